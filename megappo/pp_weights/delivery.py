"""How does a version reach engines on other ranks than the one that receives it? `Lead` on rank 0, `Follow` on theirs.

They share a gloo group of their own, made from the rendezvous store, so a rank that is not in the training world can follow. The
lead announces each step with one small message. A follower on the lead's host opens the bucket's memory by its path. Others get
the bytes by broadcast, into memory of their own, which their engine reads. Names and places travel once, at the set-up, as JSON.

All or none: an engine's failure is kept until the update ends, so that nobody is left waiting. Then it is told to all, and no
engine puts the version in force.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from megappo.errors import PeerFailed, RunFailed, UserError
from megappo.pp_weights.buffer import WeightBuffer
from megappo.pp_weights.cuda_ipc import PREFIX as ON_DEVICE
from megappo.pp_weights.host_group import HostGroup
from megappo.pp_weights.manifest import Manifest
from megappo.pp_weights.transport import host_identity
from megappo.pp_weights.update import Bucket, Guarded, Receiver, Update, pack_update, unpack_update

logger = logging.getLogger("megappo")

Way = Literal["shared_memory", "broadcast"]
ToEngines = Literal["auto", "shared_memory", "broadcast"]

LEAD = 0
ABANDON_WAIT_S = 5.0  # for the followers to hear of it; one that is stuck elsewhere does not


class Step(IntEnum):
    """What the lead announces; a message is (step, three numbers)."""

    START = 1  # version, verify
    SETTLE = 2
    LOAD = 3  # bucket, place, and the bytes of the place's paths where it is new; then these, then checksums where they are due
    FINISH = 4
    ABANDON = 5


class Lead:
    """The receiver on rank 0: its own engine, if it has one, and all followers. Set up by all of them together.

    followers: ranks that follow. layout, buckets: as `WeightManager` has them, of any version; from one to the next, buckets may
    lie elsewhere. own: this rank's engine.
    on_wait: called while other ranks are awaited; raises where the run has failed.
    """

    def __init__(
        self,
        store: Store,
        followers: Sequence[int],
        layout: Update,
        buckets: Sequence[Bucket],
        own: Receiver | None,
        to_engines: ToEngines = "auto",
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        store = PrefixStore("megappo/delivery", store)
        self._followers = followers
        self._engine = Guarded(own)
        hosts = dict(zip(followers, _wait_for(store, [f"host/{rank}" for rank in followers], on_wait), strict=True))
        self.ways = {rank: _choose(to_engines, rank, host) for rank, host in hosts.items()}
        elsewhere = [rank for rank in followers if self.ways[rank] == "broadcast"]
        _refuse_device_memory(buckets)
        manifests = [bucket.manifests for bucket in buckets]
        self._room = _room(manifests)
        self._places: dict[tuple[str, ...], list[WeightBuffer]] = {}  # paths that were announced -> their memory, for the bytes
        store.set("layout", _layout_to_json(self.ways, layout, manifests))
        self._group = HostGroup(store, "control", [LEAD, *followers], LEAD)
        self._bytes = HostGroup(store, "bytes", [LEAD, *elsewhere], LEAD) if elsewhere else None
        self._is_finished = self._verifies = False

    def start(self, update: Update) -> None:
        self._verifies = update.verify
        self._announce(Step.START, update.version, update.verify)
        self._engine.start(update)

    def settle(self) -> None:
        self._announce(Step.SETTLE)
        self._engine.settle()
        self._group.meet()

    def load(self, bucket: Bucket) -> None:
        memory = self._places.get(bucket.paths)
        if memory is None:
            paths = json.dumps(bucket.paths).encode()
            self._announce(Step.LOAD, bucket.index, len(self._places), len(paths))
            self._group.broadcast(torch.frombuffer(bytearray(paths), dtype=torch.uint8))
            memory = (
                [WeightBuffer.open(path, room) for path, room in zip(bucket.paths, self._room, strict=True)]
                if self._bytes
                else []
            )
            self._places[bucket.paths] = memory
        else:
            self._announce(Step.LOAD, bucket.index, list(self._places).index(bucket.paths))
        if self._verifies:
            sums = [entry.checksum for manifest in bucket.manifests for entry in manifest.entries]
            self._group.broadcast(torch.from_numpy(np.array(sums, np.uint64).view(np.int64)))
        self._engine.load(bucket)  # its own process reads while the bytes travel
        if self._bytes is not None:
            for shard, manifest in zip(memory, bucket.manifests, strict=True):
                self._bytes.broadcast_bytes(shard.data[: manifest.total_bytes])

    def finish(self) -> None:
        self._announce(Step.FINISH)
        self._is_finished = True  # whatever comes of it, nobody waits for another step
        _end_together(self._group, self._engine)

    @contextmanager
    def update(self) -> Iterator[None]:
        """To be entered around all steps of an update. Where it breaks off, before or after its start, the followers are told, so
        that none waits for its next step."""
        self._is_finished = False
        try:
            yield
        except Exception:
            if not self._is_finished:
                self._abandon()
            raise

    def close(self) -> None:
        for memory in self._places.values():
            for shard in memory:
                shard.close()
        self._group.close()
        if self._bytes is not None:
            self._bytes.close()

    def _abandon(self) -> None:
        try:
            self._group.broadcast(_message(Step.ABANDON), ABANDON_WAIT_S)
        except RuntimeError as error:
            logger.debug("not every engine heard that the update is given up: %s", error)
        self._engine.settle()  # nothing may be reading what is written next

    def _announce(self, step: Step, *numbers: int) -> None:
        self._group.broadcast(_message(step, *numbers))


class Follow:
    """The receiver on another rank that has an engine. A rank of the training world passes it to `WeightManager.publish`, which
    makes the steps that the lead makes; a rank that only generates calls `take`.

    engine: this rank's. on_wait: as for Lead.
    """

    def __init__(self, store: Store, rank: int, engine: Receiver, on_wait: Callable[[], None] = lambda: None) -> None:
        store = PrefixStore("megappo/delivery", store)
        store.set(f"host/{rank}", host_identity())
        self.ways, self._layout, self._manifests = _layout_from_json(_wait_for(store, ["layout"], on_wait)[0])
        followers = list(self.ways)
        elsewhere = [other for other in followers if self.ways[other] == "broadcast"]
        self._engine = Guarded(engine)
        self._places: list[tuple[str, ...]] = []  # the lead's, in the order of their announcement
        self._memory: list[list[WeightBuffer]] = []  # own memory for each of them, where the bytes come here
        self._group = HostGroup(store, "control", [LEAD, *followers], rank)
        self._bytes = HostGroup(store, "bytes", [LEAD, *elsewhere], rank) if rank in elsewhere else None
        self._version, self._verifies = 0, False

    def start(self, update: Update) -> None:
        self._follow(Step.START)

    def settle(self) -> None:
        self._follow(Step.SETTLE)

    def load(self, bucket: Bucket) -> None:
        self._follow(Step.LOAD)

    def finish(self) -> None:
        self._follow(Step.FINISH)

    def take(self) -> None:
        """Follow one update from its start to its end."""
        while self._follow() is not Step.FINISH:
            pass

    def close(self) -> None:
        for memory in self._memory:
            for shard in memory:
                shard.close()
        self._group.close()
        if self._bytes is not None:
            self._bytes.close()

    def _follow(self, expected: Step | None = None) -> Step:
        message = _message(Step.ABANDON)
        self._group.broadcast(message)
        number, one, two, three = message.tolist()
        step = Step(number)
        if step is Step.ABANDON:
            self._engine.settle()  # nothing may be reading what is written next
            raise PeerFailed("the rank that receives the weights gave the update up")
        if expected is not None and step is not expected:
            raise RunFailed(f"the hand-over went out of step: {step.name} came from the lead, {expected.name} was due")
        if step is Step.START:
            self._version, self._verifies = one, bool(two)
            self._engine.start(replace(self._layout, version=self._version, verify=self._verifies))
        elif step is Step.SETTLE:
            self._engine.settle()
            self._group.meet()
        elif step is Step.LOAD:
            if three:
                self._learn_place(three)
            self._load(one, two)
        else:
            _end_together(self._group, self._engine)
        return step

    def _learn_place(self, num_bytes: int) -> None:
        text = torch.empty(num_bytes, dtype=torch.uint8)
        self._group.broadcast(text)
        paths = tuple(json.loads(text.numpy().tobytes()))
        if self._bytes is not None:
            self._memory.append([WeightBuffer.create(room) for room in _room(self._manifests)])
            paths = tuple(shard.path for shard in self._memory[-1])
        self._places.append(paths)

    def _load(self, index: int, place: int) -> None:
        manifests = [manifest.stamped(self._version) for manifest in self._manifests[index]]
        if self._verifies:
            received = torch.empty(sum(len(manifest.entries) for manifest in manifests), dtype=torch.int64)
            self._group.broadcast(received)
            sums = iter(received.numpy().view(np.uint64).tolist())
            manifests = [m.stamped(self._version, dict(zip(m.names, sums, strict=False))) for m in manifests]
        if self._bytes is not None:
            for shard, manifest in zip(self._memory[place], manifests, strict=True):
                self._bytes.broadcast_bytes(shard.data[: manifest.total_bytes])
        self._engine.load(Bucket(index, self._places[place], tuple(manifests)))


def _end_together(group: HostGroup, engine: Guarded) -> None:
    """The end of an update on every rank: the version comes into force where all engines have taken it, nowhere otherwise.

    Raises the own engine's failure; PeerFailed with the first other one's."""
    for step in (engine.settle, engine.finish):
        step()
        failures = group.tell_all(engine.error)
        if engine.error is not None:
            raise engine.error
        for rank, why in failures.items():
            raise PeerFailed(f"the engine on rank {rank} did not take the weights: {why}")


def _choose(to_engines: ToEngines, rank: int, host: str) -> Way:
    shares = host == host_identity()
    if to_engines == "shared_memory" and not shares:
        raise UserError(
            f"pp_weights.to_engines=shared_memory needs every engine on rank 0's host (and in its container); rank {rank} is "
            f"elsewhere: use broadcast, or auto"
        )
    if to_engines == "auto":
        return "shared_memory" if shares else "broadcast"
    return to_engines


def _refuse_device_memory(buckets: Sequence[Bucket]) -> None:
    if any(path.startswith(ON_DEVICE) for bucket in buckets for path in bucket.paths):
        raise UserError(
            "pp_weights.transport=cuda_ipc keeps the weights on the GPU, and engines elsewhere get them from host memory; use "
            "pp_weights.transport=shared_memory or collective"
        )


def _room(manifests: Sequence[Sequence[Manifest]]) -> list[Manifest]:
    """Memory that holds any bucket, for each of the engine's shards."""
    return [Manifest((), max(manifest.total_bytes for manifest in shard)) for shard in zip(*manifests, strict=True)]


def _message(step: Step, *numbers: int) -> Tensor:
    return torch.tensor([step, *numbers, 0, 0, 0][:4], dtype=torch.int64)


def _layout_to_json(ways: Mapping[int, Way], update: Update, manifests: Sequence[Sequence[Manifest]]) -> str:
    return json.dumps(
        {
            "ways": list(ways.items()),
            "update": pack_update(update),
            "manifests": [[manifest.to_json() for manifest in shards] for shards in manifests],
        }
    )


def _layout_from_json(text: str) -> tuple[dict[int, Way], Update, list[list[Manifest]]]:
    layout = json.loads(text)
    manifests = [[Manifest.from_json(manifest) for manifest in shards] for shards in layout["manifests"]]
    return dict(layout["ways"]), unpack_update(layout["update"]), manifests


def _wait_for(store: Store, keys: Sequence[str], on_wait: Callable[[], None]) -> list[str]:
    """The values of the keys, once all are there. Looks again and again instead of blocking, so that a failure is heard."""
    while not store.check(list(keys)):
        on_wait()
        time.sleep(0.02)
    return [store.get(key).decode() for key in keys]
