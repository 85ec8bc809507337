"""Do engines on other ranks get exactly what the lead's engine gets, over both ways, and all of them or none?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megappo.errors import PeerFailed, RunFailed, UserError
from megappo.pp_weights import delivery
from megappo.pp_weights.assemble import Assembler
from megappo.pp_weights.buffer import WeightBuffer, views_of
from megappo.pp_weights.delivery import Follow, Lead
from megappo.pp_weights.manifest import Manifest, TensorMeta, build_manifest
from megappo.pp_weights.update import Bucket, Receiver, Update
from megappo.pp_weights.verify import checksums
from tests.pool import Pool

pytestmark = pytest.mark.distributed

META = {
    "a.weight": TensorMeta((5, 7), torch.float32),
    "b.weight": TensorMeta((1000,), torch.bfloat16),
    "c.bias": TensorMeta((), torch.int8),
    "d.weight": TensorMeta((3, 0), torch.float32),
    "e.weight": TensorMeta((2, 9), torch.float64),
}
BUCKETS = (("a.weight", "d.weight"), ("b.weight",), ("c.bias", "e.weight"))


def tensors_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(m.shape, generator=generator).mul(50).to(m.dtype) for name, m in META.items()}


class Sender:
    """What the weight manager does on rank 0: three buckets that take turns in two memories, or follow each other in one."""

    def __init__(self, num_slots: int = 2) -> None:
        self.manifests = [build_manifest({name: META[name] for name in names}, order=names) for names in BUCKETS]
        size = max(manifest.total_bytes for manifest in self.manifests)
        self.slots = [WeightBuffer.create(Manifest((), size)) for _ in range(num_slots)]
        self.buckets = [Bucket(i, (self.slots[i % num_slots].path,), (manifest,)) for i, manifest in enumerate(self.manifests)]
        whole = build_manifest(META)
        self.layout = Update(0, whole.table, whole.fingerprint, len(self.buckets))

    def publish(
        self, receiver: Receiver, version: int, verify: bool, damage: Callable[[int], None] = lambda bucket: None
    ) -> None:
        receiver.start(replace(self.layout, version=version, verify=verify))
        tensors = tensors_of(version)
        for bucket, manifest in zip(self.buckets, self.manifests, strict=True):
            slot = self.slots[bucket.index % len(self.slots)]
            if len(self.slots) == 1:
                receiver.settle()  # what is written next is where the bucket before is
            views = views_of(slot.data, manifest)
            for name, view in views.items():
                view.copy_(tensors[name])
            sums = checksums(views) if verify else None
            damage(bucket.index)
            if len(self.slots) > 1:
                receiver.settle()
            receiver.load(replace(bucket, manifests=(manifest.stamped(version, sums),)))
        receiver.finish()
        for slot in self.slots:
            slot.data.fill_(255)


class Engine:
    """Takes notes of what it is given, by path, as a process of its own would. It reads a bucket when it settles, no sooner."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.version: int | None = None
        self.fails_in: tuple[str, int] | None = None
        self.paths: set[str] = set()
        self._pending: list[Bucket] = []

    def start(self, update: Update) -> None:
        self.version, self._update, self._assembler, self._pending = None, update, Assembler(update), []
        self._taken: dict[str, torch.Tensor] = {}
        self._fail("start", 0)

    def settle(self) -> None:
        for bucket in self._pending:
            time.sleep(0.02 * dist.get_rank())  # slower than the lead, which must not write before
            self.paths |= set(bucket.paths)
            memory = WeightBuffer.open(bucket.paths[0], bucket.manifests[0])
            for name, tensor in self._assembler.tensors(memory.manifest, memory.views()):
                self._taken[name] = tensor.clone()
            memory.close()
        self._pending = []

    def load(self, bucket: Bucket) -> None:
        self._fail("load", bucket.index)
        self._pending.append(bucket)

    def finish(self) -> None:
        self.settle()
        self._fail("finish", 0)
        self._assembler.finish()
        self.held, self.version = self._taken, self._update.version

    def holds(self, version: int) -> bool:
        wanted = tensors_of(version)
        equal = self.held.keys() == wanted.keys() and all(torch.equal(self.held[name], wanted[name]) for name in wanted)
        return equal and self.version == version

    def _fail(self, where: str, number: int) -> None:
        if self.fails_in == (where, number):
            raise RunFailed(f"no room in {where} {number}")


def store_of_this_job() -> Any:
    return dist.distributed_c10d._get_default_store()


class Rank:
    """One end of a delivery over all ranks of the job, with an engine. `ways`: of the followers, by rank."""

    def __init__(self, to_engines: Any, num_slots: int = 2) -> None:
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.engine = Engine()
        self.sender: Sender | None = None
        self.end: Lead | Follow
        if self.rank == 0:
            self.sender = Sender(num_slots)
            followers = list(range(1, world))
            self.end = Lead(store_of_this_job(), followers, self.sender.layout, self.sender.buckets, self.engine, to_engines)
        else:
            self.end = Follow(store_of_this_job(), self.rank, self.engine)
        self.ways = self.end.ways

    def publish(self, version: int, verify: bool = True, damage: Callable[[int], None] = lambda bucket: None) -> str:
        """What was raised."""
        try:
            if isinstance(self.end, Lead):
                assert self.sender is not None
                with self.end.update():
                    self.sender.publish(self.end, version, verify, damage)
            else:
                self.end.take()
        except (RunFailed, KeyError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def close(self) -> None:
        self.end.close()


def deliver_four_versions(to_engines: Any) -> Any:
    """With checksums and without."""
    num_slots = 1 if to_engines == "shared_memory" else 2
    rank = Rank(to_engines, num_slots)
    right = []
    for version, verify in ((1, True), (2, False), (3, False), (7, True)):
        assert rank.publish(version, verify) == ""
        right.append(rank.engine.holds(version))
    assert len(rank.engine.paths) == num_slots  # the buckets take turns, everywhere
    own_memory = all(path.startswith(f"/proc/{os.getpid()}/") for path in rank.engine.paths)
    rank.close()
    return right, own_memory, rank.ways


@pytest.mark.parametrize("to_engines", ["shared_memory", "broadcast", "auto"])
def test_every_engine_holds_each_version_whole(pool: Pool, to_engines: str) -> None:
    results = pool.run(3, deliver_four_versions, to_engines)
    assert [right for right, _, _ in results] == [[True] * 4] * 3
    way = "broadcast" if to_engines == "broadcast" else "shared_memory"
    assert all(ways == {1: way, 2: way} for _, _, ways in results)
    assert [own for _, own, _ in results[1:]] == [way == "broadcast"] * 2  # the other way they read rank 0's


def deliver_to_two_hosts() -> Any:
    """Rank 2 is elsewhere: it cannot open what rank 0 has."""
    own = delivery.host_identity
    if dist.get_rank() == 2:
        delivery.host_identity = lambda: "another machine"
    try:
        return deliver_four_versions("auto")
    finally:
        delivery.host_identity = own


def test_an_engine_elsewhere_gets_the_bytes_and_the_others_read_them_in_place(pool: Pool) -> None:
    results = pool.run(3, deliver_to_two_hosts)
    assert results[0][2] == {1: "shared_memory", 2: "broadcast"}
    assert [(right, own) for right, own, _ in results[1:]] == [([True] * 4, False), ([True] * 4, True)]


FAILURES = [(rank, where) for rank in (0, 2) for where in (("start", 0), ("load", 0), ("load", 1), ("finish", 0))]


def deliver_with_failures(to_engines: str) -> Any:
    """One case after the other: a version that arrives, one on which an engine fails, one that arrives."""
    rank = Rank(to_engines)
    found = []
    for number, (failing, where) in enumerate(FAILURES):
        said = [rank.publish(10 * number + 1)]
        rank.engine.fails_in = where if rank.rank == failing else None
        said.append(rank.publish(10 * number + 2))
        version = rank.engine.version
        rank.engine.fails_in = None
        said.append(rank.publish(10 * number + 3))
        found.append((said, version, rank.engine.holds(10 * number + 3)))
    rank.close()
    return found


@pytest.mark.parametrize("to_engines", ["shared_memory", "broadcast"])
def test_one_engine_that_fails_leaves_none_with_the_version_until_the_next(pool: Pool, to_engines: str) -> None:
    results = pool.run(3, deliver_with_failures, to_engines)
    for rank, found in enumerate(results):
        for number, (failing, where) in enumerate(FAILURES):
            said, version, repaired = found[number]
            why = f"no room in {where[0]} {where[1]}"
            other = f"PeerFailed: the engine on rank {failing} did not take the weights: {why}"
            assert said == ["", f"RunFailed: {why}" if rank == failing else other, ""]
            # What shows only when a version is put in force, the others cannot know before they do so.
            assert version is None or (where[0] == "finish" and rank != failing)
            assert repaired


def deliver_damaged(to_engines: str) -> Any:
    rank = Rank(to_engines)

    def flip_a_byte(bucket: int) -> None:
        if bucket == 1:
            assert rank.sender is not None
            rank.sender.slots[1].data[1234] ^= 1

    said = rank.publish(1, True, flip_a_byte)
    version = rank.engine.version
    said_unverified = rank.publish(2, False, flip_a_byte)
    whole = rank.engine.holds(2)
    rank.close()
    return said, version, said_unverified, whole


@pytest.mark.parametrize("to_engines", ["shared_memory", "broadcast"])
def test_checksums_travel_with_the_bytes(pool: Pool, to_engines: str) -> None:
    for said, version, said_unverified, whole in pool.run(2, deliver_damaged, to_engines):
        assert said == "RunFailed: weights version 1: bytes differ from what was published: b.weight"
        assert version is None
        assert (said_unverified, whole) == ("", False)


POINTS = (None, 0, 2)


def break_off() -> Any:
    """The lead's own side fails: before an update starts, before its first bucket, before its last."""
    rank = Rank("auto")
    found = []
    for number, point in enumerate(POINTS):
        rank.publish(10 * number + 1)

        def fail(bucket: int, point: int | None = point) -> None:
            if bucket == point:
                raise KeyError("lost")

        if rank.rank == 0 and point is None:
            with pytest.raises(KeyError), rank.end.update():  # type: ignore[union-attr]
                raise KeyError("not even begun")
            said = ""
        else:
            said = rank.publish(10 * number + 2, True, fail)
        version = rank.engine.version
        next_said = rank.publish(10 * number + 3)
        found.append((said, version, next_said, rank.engine.holds(10 * number + 3)))
    rank.close()
    return found


def test_an_update_that_the_lead_gives_up_frees_the_followers(pool: Pool) -> None:
    results = pool.run(3, break_off)
    gave_up = "PeerFailed: the rank that receives the weights gave the update up"
    for rank, found in enumerate(results):
        for number, point in enumerate(POINTS):
            said, version, next_said, repaired = found[number]
            assert said == (gave_up if rank else "" if point is None else "KeyError: 'lost'")
            assert version == (10 * number + 1 if point is None else None)
            assert (next_said, repaired) == ("", True)


def a_lead_without_an_engine_of_its_own() -> bool:
    if dist.get_rank() == 0:
        sender = Sender()
        lead = Lead(store_of_this_job(), [1], sender.layout, sender.buckets, None, "auto")
        sender.publish(lead, 1, True)
        lead.close()
        return True
    engine = Engine()
    follow = Follow(store_of_this_job(), 1, engine)
    follow.take()
    follow.close()
    return engine.holds(1)


def test_the_lead_needs_no_engine(pool: Pool) -> None:
    assert pool.run(2, a_lead_without_an_engine_of_its_own) == [True, True]


def follow_out_of_step() -> str:
    """A training rank whose manager makes other steps than the lead's."""
    rank = Rank("auto")
    try:
        if isinstance(rank.end, Lead):
            assert rank.sender is not None
            rank.end.start(rank.sender.layout)
        else:
            rank.end.settle()
    except RunFailed as error:
        return str(error)
    finally:
        rank.close()
    return ""


def test_a_follower_that_is_out_of_step_says_so(pool: Pool) -> None:
    said = pool.run(2, follow_out_of_step)
    assert said == ["", "the hand-over went out of step: START came from the lead, SETTLE was due"]


def test_shared_memory_for_an_engine_on_another_host_is_refused() -> None:
    with pytest.raises(UserError, match=r"pp_weights\.to_engines=shared_memory needs .*; rank 4 is elsewhere"):
        delivery._choose("shared_memory", 4, "another machine")


def test_memory_on_a_gpu_is_not_broadcast() -> None:
    manifest = build_manifest(META)
    with pytest.raises(UserError, match=r"pp_weights\.transport=cuda_ipc"):
        delivery._refuse_device_memory([Bucket(0, ("cuda-ipc:{}",), (manifest,))])


def test_a_set_up_that_waits_hears_of_a_failure(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def failed() -> None:
        raise Stop

    store = dist.HashStore()
    with pytest.raises(Stop):
        Follow(store, 1, Engine(), failed)
    sender = Sender()
    with pytest.raises(Stop):
        Lead(store, [1, 2], sender.layout, sender.buckets, None, "auto", failed)


def test_a_follower_that_knows_another_failed_is_no_first_cause() -> None:
    from megappo.controller.failure import is_consequence

    assert is_consequence(PeerFailed("the engine on rank 2 did not take the weights"))
    assert not is_consequence(RunFailed("no room"))
