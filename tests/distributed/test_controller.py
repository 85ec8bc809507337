"""A local world of toy workers: calls and answers, and how it ends when something goes wrong. No megatron."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed
import zmq

import megappo.pp_weights.line_copy  # noqa: F401  compiled once, before the forks
from megappo.controller import host_memory
from megappo.controller.colocate import create_colocated_worker
from megappo.controller.dispatch import Dispatch, dispatched
from megappo.controller.failure import read_failure
from megappo.controller.launch import join_world, launch_local
from megappo.controller.local_group import LocalWorkerGroup, serve
from megappo.controller.watchdog import Watchdog
from megappo.errors import RunFailed, UserError
from megappo.parallel_state.layout import ParallelLayout

pytestmark = [pytest.mark.distributed, pytest.mark.faults]
WATCHDOG_S = 4.0
DP2_PP2 = ParallelLayout(num_layers=4, dp=2, pp=2)


class Toy:
    """A role whose methods do what a test needs."""

    def __init__(self, rank: int, run_dir: Path) -> None:
        self.rank, self.run_dir = rank, run_dir
        self.kept = []

    @dispatched(Dispatch.DP)
    def double(self, tensors, amount):
        rows = tensors["x"].shape[0]
        tensors["x"].mul_(2)  # a worker may write into what it got
        return {"doubled": tensors["x"] + amount, "sample_ids": tensors["sample_ids"]}, {"rank": self.rank, "rows": rows}

    @dispatched(Dispatch.DP)
    def reverse(self, tensors):
        return {"sample_ids": tensors["sample_ids"].flip(0)}, {}

    @dispatched(Dispatch.DP)
    def lose_a_row(self, tensors):
        return {"x": tensors["x"][1:]}, {}

    @dispatched(Dispatch.ALL)
    def where(self, note=None):
        return {"rank": self.rank, "pid": os.getpid(), "note": note}

    @dispatched(Dispatch.ALL)
    def scaled(self, tensors, by):
        return {"x": tensors["x"] * (by + self.rank)}, "done"

    @dispatched(Dispatch.ALL)
    def keep(self, tensors, name):
        """Keep one tensor beyond the call, write into the others, and tell how many mappings the rank has."""
        self.kept.append(tensors[name])
        for other, tensor in tensors.items():
            if other != name:
                tensor.zero_()
        return len(mapped_rows())

    @dispatched(Dispatch.ALL)
    def means_of_kept(self):
        return [float(tensor.double().mean()) for tensor in self.kept]

    @dispatched(Dispatch.ALL)
    def forget(self):
        self.kept.clear()

    @dispatched(Dispatch.ALL)
    def checked(self, tensors):
        """Sums of all tensors, which are then overwritten; whether any of them was mapped."""
        sums = {name: int(tensor.long().sum()) for name, tensor in tensors.items()}
        is_mapped = bool(mapped_rows())
        for tensor in tensors.values():
            tensor.fill_(1)
        return {"shapes": [list(tensor.shape) for tensor in tensors.values()], "sums": sums, "is_mapped": is_mapped}

    @dispatched(Dispatch.DP)
    def rows_of(self, tensors):
        """Each row's sum, and the sample ids as they came."""
        found = {"sums": tensors["x"].long().sum(dim=1), "sample_ids": tensors["sample_ids"]}
        tensors["x"].zero_()
        return found, {}

    @dispatched(Dispatch.ALL)
    def die_with_rows(self, tensors, rank):
        (self.run_dir / f"mapped_{self.rank}").write_text(str(len(mapped_rows())))
        torch.distributed.barrier()
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    @dispatched(Dispatch.ALL)
    def meet(self):
        torch.distributed.all_reduce(torch.ones(1))

    @dispatched(Dispatch.ALL)
    def meet_but_rank_1(self, does, timeout_s=None):
        """All ranks wait in a collective for rank 1, which does something else."""
        if self.rank != 1:
            torch.distributed.all_reduce(torch.ones(1))
        elif does == "raise":
            raise ValueError("no such row")
        elif does == "user error":
            raise UserError("model.path=x does not exist; give a folder")
        elif does == "die":
            time.sleep(1)  # the phase is on the store by then
            os.kill(os.getpid(), signal.SIGKILL)
        elif does == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif does == "exit":
            os._exit(7)
        elif does == "sleep":
            (self.run_dir / "asleep").touch()
            time.sleep(60)

    @dispatched(Dispatch.ALL)
    def start_children(self):
        """A child, and one that has left the rank's process group and whose parent is gone."""
        subprocess.Popen(["sleep", "61"])
        command = "import subprocess; subprocess.Popen(['sleep', '62'], start_new_session=True)"
        subprocess.run([sys.executable, "-S", "-c", command], check=True)


def world(
    run_dir: Path,
    drive: Callable[[LocalWorkerGroup], None],
    layout: ParallelLayout | None = None,
    gloo_s: float = 60,
    ranks: dict[str, list[int]] | None = None,
    far: tuple[int, ...] = (),
) -> int:
    """The entry of every rank. ranks: where the roles live; by default there is one, on all. far: as if on another host."""
    rank, world_size, store = join_world(os.environ)
    with Watchdog(store, rank, world_size, run_dir, WATCHDOG_S, grace_s=2.0) as watchdog:
        torch.distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=gloo_s)
        )
        roles = {role: Toy(rank, run_dir) for role, where in (ranks or {"actor": [rank]}).items() if rank in where}
        worker = create_colocated_worker(roles)
        if rank == 0:
            with LocalWorkerGroup({"actor": layout} if layout else {}, worker, watchdog, ranks=ranks) as group:
                drive(group)
        else:
            serve(worker, watchdog, maps_rows=rank not in far)
    return 0


def mapped_rows(kind: str = "rw-p") -> list[str]:
    """This process's mappings of memory for rows: private ones, or ("rw-s") the driver's own."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f"memfd:{host_memory.NAME} " in line and kind in line]


def is_running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def adopt_orphans(on: bool) -> None:
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, int(on), 0, 0, 0)


@dataclass
class Outcome:
    code: int
    error: str
    message: str
    seconds: float


@dataclass
class Launch:
    """A launcher in a process of its own, as it is on a command line."""

    run_dir: Path
    world_size: int
    entry: Callable[[], int]

    def __post_init__(self) -> None:
        self.run_dir.mkdir(exist_ok=True)
        self.began = time.monotonic()
        self.before = set(psutil.Process().children(recursive=True))
        adopt_orphans(True)  # what outlives the launcher is found among this process's children
        self.process = get_context("fork").Process(target=self._main)
        self.process.start()

    def _main(self) -> None:
        code, error = -1, None
        try:
            code = launch_local(self.world_size, self.entry, self.run_dir, grace_s=3.0)
        except (RunFailed, UserError) as raised:
            error = raised
        outcome = {"code": code, "error": type(error).__name__ if error else "", "message": str(error or "")}
        (self.run_dir / "outcome.json").write_text(json.dumps(outcome))

    def wait(self, timeout_s: float = 40) -> Outcome:
        self.process.join(timeout_s)
        adopt_orphans(False)
        left = [p for p in set(psutil.Process().children(recursive=True)) - self.before if is_running(p.pid)]
        for process in left:
            process.kill()
        assert not left, f"left running: {left}"
        return Outcome(**json.loads((self.run_dir / "outcome.json").read_text()), seconds=time.monotonic() - self.began)


def run(run_dir: Path, drive: Callable[[LocalWorkerGroup], None], world_size: int = 3, **options) -> Outcome:
    return Launch(run_dir, world_size, lambda: world(run_dir, drive, **options)).wait()


# -- calls and answers -------------------------------------------------------------------------------------------------


def test_rows_come_back_in_order_and_metrics_from_the_first_collector(tmp_path):
    def drive(group):
        x, ids = torch.arange(5.0), torch.tensor([7, 3, 9, 1, 5])
        tensors, metrics = group.call("actor", "double", {"x": x, "sample_ids": ids}, amount=0.5)
        assert tensors["doubled"].tolist() == [0.5, 2.5, 4.5, 6.5, 8.5]
        assert tensors["sample_ids"].tolist() == [7, 3, 9, 1, 5]
        assert metrics == {"rank": 2, "rows": 3}  # rank 2 is dp 0 of the last stage
        assert x.tolist() == [0, 1, 2, 3, 4]  # rank 0's worker wrote into a copy

    assert run(tmp_path, drive, world_size=4, layout=DP2_PP2) == Outcome(0, "", "", pytest.approx(0, abs=30))


def test_a_dp_rank_without_rows_takes_part(tmp_path):
    def drive(group):
        tensors, _ = group.call("actor", "double", {"x": torch.ones(1, 2), "sample_ids": torch.tensor([4])}, amount=1)
        assert tensors["doubled"].tolist() == [[3.0, 3.0]]

    assert run(tmp_path, drive, world_size=4, layout=DP2_PP2).code == 0


def test_all_ranks_answer_by_rank_with_values_or_tensors(tmp_path):
    def drive(group):
        answers = group.call("actor", "where", note=("a", 1))
        assert [a["rank"] for a in answers] == [0, 1, 2]
        assert len({a["pid"] for a in answers}) == 3
        assert all(a["note"] == ["a", 1] for a in answers)  # on rank 0 too, where nothing travelled
        scaled = group.call("actor", "scaled", {"x": torch.ones(2, dtype=torch.bfloat16)}, by=2)
        assert [(tensors["x"].tolist(), value) for tensors, value in scaled] == [
            ([2, 2], "done"),
            ([3, 3], "done"),
            ([4, 4], "done"),
        ]

    assert run(tmp_path, drive).code == 0


def test_roles_live_on_some_ranks_and_each_gets_tensors_of_its_own(tmp_path):
    def drive(group):
        assert [a["rank"] for a in group.call("engine", "where")] == [2, 4]
        assert [a["rank"] for a in group.call("both", "where")] == [0, 4]
        shares = [{"x": torch.tensor([1.0])}, {"x": torch.tensor([5.0, 7.0])}]
        scaled = group.call("engine", "scaled", shares, by=10)  # by + rank
        assert [tensors["x"].tolist() for tensors, _ in scaled] == [[12.0], [70.0, 98.0]]
        scaled = group.call("both", "scaled", shares, by=10)
        assert [tensors["x"].tolist() for tensors, _ in scaled] == [[10.0], [70.0, 98.0]]
        assert [tensors["x"].tolist() for tensors, _ in group.call("engine", "scaled", shares[0], by=0)] == [[2.0], [4.0]]
        # rows are split over the ranks of the role that has a layout, which are not all
        doubled, _ = group.call("actor", "double", {"x": torch.arange(3.0), "sample_ids": torch.arange(3)}, amount=0)
        assert doubled["doubled"].tolist() == [0, 2, 4]
        with pytest.raises(ValueError, match="given tensors for 1 ranks; 'engine' lives on 2"):
            group.call("engine", "scaled", shares[:1], by=1)

    ranks = {"actor": [0, 1, 2, 3], "engine": [2, 4], "both": [0, 4]}
    outcome = run(tmp_path, drive, world_size=5, layout=DP2_PP2, ranks=ranks)
    assert (outcome.code, outcome.message) == (0, "")


def test_a_world_of_one_needs_no_sockets_and_no_watchdog(tmp_path):
    worker = create_colocated_worker({"actor": Toy(0, tmp_path)})
    with LocalWorkerGroup({"actor": ParallelLayout(num_layers=1)}, worker) as group:
        tensors, metrics = group.call("actor", "double", {"x": torch.ones(2), "sample_ids": torch.arange(2)}, amount=0)
        assert tensors["doubled"].tolist() == [2, 2]
        assert metrics == {"rank": 0, "rows": 2}
        with pytest.raises(RunFailed, match=r"failed in actor\.lose_a_row: ValueError: actor\.lose_a_row returned 'x' of shape"):
            group.call("actor", "lose_a_row", {"x": torch.ones(2)})
        with pytest.raises(RunFailed, match="lose_a_row"):
            group.call("actor", "where")


def test_rows_in_another_order_are_an_error(tmp_path):
    def drive(group):
        group.call("actor", "reverse", {"sample_ids": torch.arange(4)})

    outcome = run(tmp_path, drive, world_size=4, layout=DP2_PP2)
    assert "actor.reverse returned its rows in another order" in outcome.message


def test_a_layout_of_another_size_than_the_world_is_a_user_error(tmp_path):
    outcome = run(tmp_path, lambda group: None, world_size=2, layout=DP2_PP2)
    assert (outcome.error, "= 4 ranks, but the world has 2" in outcome.message) == ("UserError", True)


def test_a_stranger_without_the_token_is_not_heard(tmp_path):
    def entry():
        rank, world_size, store = join_world(os.environ)
        with Watchdog(store, rank, world_size, tmp_path, WATCHDOG_S) as watchdog:
            worker = create_colocated_worker({"actor": Toy(rank, tmp_path)})
            if rank == 1:
                store.wait(["megappo/controller"])
                meeting = json.loads(store.get("megappo/controller"))
                context = zmq.Context()
                stranger = context.socket(zmq.DEALER)
                stranger.setsockopt(zmq.IDENTITY, b"guess/1")
                stranger.connect(f"tcp://127.0.0.1:{meeting['port']}")
                stranger.send(b"hello")
                time.sleep(0.3)
                assert not stranger.poll(0)
                serve(worker, watchdog)
                assert not stranger.poll(0)  # it never got a call
                context.destroy(linger=0)
                return 0
            with LocalWorkerGroup({}, worker, watchdog) as group:
                assert len(group.call("actor", "where")) == 2
        return 0

    assert Launch(tmp_path, 2, entry).wait().code == 0


# -- large tensors -------------------------------------------------------------------------------------------------------


def large_batch(rows=7, width=90_000) -> dict[str, torch.Tensor]:
    """Tensors of several kinds, of which some are no plain blocks."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50_000, (width, rows), generator=generator).t()
    return {
        "x": ids,
        "mask": ids % 3 == 0,
        "floats": ids.float()[:, ::2],
        "wide": torch.arange(width).expand(rows, width),
        "nothing": torch.zeros(rows, 0),
        "sample_ids": torch.arange(rows) * 5,
    }


@pytest.mark.parametrize("far", [(), (2,), (1, 2, 3)], ids=["one host", "two hosts", "a host for the driver alone"])
def test_large_tensors_reach_all_ranks_and_what_these_write_nobody_else(tmp_path, far):
    def drive(group):
        given = {**large_batch(), "0-dim": torch.tensor(7)}
        known = {name: tensor.clone() for name, tensor in given.items()}
        sums = {name: int(tensor.long().sum()) for name, tensor in known.items()}
        for _ in range(2):
            answers = group.call("actor", "checked", given)
            assert [answer["is_mapped"] for answer in answers] == [far != (1, 2, 3)] + [rank not in far for rank in (1, 2, 3)]
            for answer in answers:
                assert answer["sums"] == sums
                assert answer["shapes"] == [list(tensor.shape) for tensor in given.values()]
        assert all(torch.equal(given[name], known[name]) for name in known)

    outcome = run(tmp_path, drive, world_size=4, far=far)
    assert (outcome.code, outcome.message) == (0, "")


@pytest.mark.parametrize("far", [(), (3,)], ids=["one host", "two hosts"])
def test_rows_of_large_tensors_come_back_in_order(tmp_path, far):
    def drive(group):
        for rows in (7, 1, 4):  # with one row the second data-parallel rank has none
            given = large_batch(rows)
            for _ in range(2):
                found, _ = group.call("actor", "rows_of", given)
                assert torch.equal(found["sums"], given["x"].sum(dim=1))
                assert torch.equal(found["sample_ids"], given["sample_ids"])

    outcome = run(tmp_path, drive, world_size=4, layout=DP2_PP2, far=far)
    assert (outcome.code, outcome.message) == (0, "")


def test_each_rank_gets_large_tensors_of_its_own(tmp_path):
    def drive(group):
        shares = [{"x": torch.full((n,), n)} for n in (30_000, 40_000, 50_000)]
        answers = group.call("actor", "checked", shares)
        assert [answer["sums"]["x"] for answer in answers] == [n * n for n in (30_000, 40_000, 50_000)]
        assert [int(share["x"][0]) for share in shares] == [30_000, 40_000, 50_000]

    assert run(tmp_path, drive).code == 0


def test_a_tensor_that_a_worker_keeps_does_not_change_and_memory_is_used_again(tmp_path):
    def drive(group):
        def give(value):
            return {"a": torch.full((100_000,), float(value)), "b": torch.full((100_000,), float(value))}

        group.call("actor", "keep", give(1), name="a")
        group.call("actor", "keep", give(2), name="b")
        for value in range(5):  # nobody keeps these: they take turns in one memory
            group.call("actor", "checked", give(value + 3))
        assert group.call("actor", "means_of_kept") == [[1, 2]] * 3
        assert group.call("actor", "keep", give(9), name="a") == [3] * 3  # two kept calls and this one
        group.call("actor", "forget")
        for value in range(5):
            group.call("actor", "checked", give(value))
        assert group.call("actor", "keep", give(9), name="a") == [1] * 3
        assert len(mapped_rows("rw-s")) == 3

    outcome = run(tmp_path, drive)
    assert (outcome.code, outcome.message) == (0, "")


@pytest.mark.parametrize("victim", [0, 1], ids=["the driver", "another rank"])
def test_a_rank_killed_with_its_rows_mapped_leaves_no_memory(tmp_path, victim):
    """Names in /dev/shm and processes that map it are all that could keep it; `wait` sees to the latter."""
    before = set(os.listdir("/dev/shm"))
    outcome = run(tmp_path, lambda group: group.call("actor", "die_with_rows", large_batch(), rank=victim))
    assert f"rank {victim} (host " in outcome.message
    assert [(tmp_path / f"mapped_{rank}").read_text() for rank in range(3)] == ["1"] * 3
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "megappo" in name or "memfd" in name]


# -- the first cause ---------------------------------------------------------------------------------------------------


def test_an_exception_on_rank_1_is_named_though_the_others_hang_in_a_collective(tmp_path):
    outcome = run(tmp_path, lambda group: group.call("actor", "meet_but_rank_1", does="raise"))
    assert outcome.error == "RankFailed"
    assert outcome.message.startswith("rank 1 (host ")
    assert "failed in actor.meet_but_rank_1: ValueError: no such row" in outcome.message
    assert "rank_00001.log" in outcome.message
    assert outcome.seconds < 20
    failure = read_failure(tmp_path)
    assert (failure.rank, failure.phase) == (1, "actor.meet_but_rank_1")
    assert 'raise ValueError("no such row")' in failure.traceback
    assert "no such row" in (tmp_path / "logs" / "rank_00001.log").read_text()
    assert "no such row" in (tmp_path / "logs" / "rank_00000.log").read_text()


def test_a_user_error_on_rank_1_stays_a_user_error(tmp_path):
    outcome = run(tmp_path, lambda group: group.call("actor", "meet_but_rank_1", does="user error"))
    assert (outcome.error, outcome.message) == ("UserError", "model.path=x does not exist; give a folder")


def test_a_rank_killed_in_a_call_is_named_with_its_signal_and_phase(tmp_path):
    outcome = run(tmp_path, lambda group: group.call("actor", "meet_but_rank_1", does="die"))
    assert outcome.message.startswith("rank 1 (host ")
    assert "was ended by SIGKILL" in outcome.message
    assert "it was last seen in actor.meet_but_rank_1" in outcome.message
    assert outcome.seconds < 20


def test_a_rank_that_exits_in_a_call_is_named_with_its_exit_code(tmp_path):
    outcome = run(tmp_path, lambda group: group.call("actor", "meet_but_rank_1", does="exit"))
    assert "rank 1 (host " in outcome.message
    assert "ended with exit code 7; it was last seen in" in outcome.message


@pytest.mark.parametrize("next_thing", ["sleep", "call"])
def test_a_rank_killed_while_idle_is_named(tmp_path, next_thing):
    def drive(group):
        os.kill(group.call("actor", "where")[1]["pid"], signal.SIGKILL)
        time.sleep(60 if next_thing == "sleep" else 0)
        group.call("actor", "where")

    outcome = run(tmp_path, drive)
    assert "rank 1 (host " in outcome.message
    assert "SIGKILL" in outcome.message
    assert outcome.seconds < 20


def test_a_frozen_rank_is_noticed_by_its_missing_beat(tmp_path):
    outcome = run(tmp_path, lambda group: group.call("actor", "meet_but_rank_1", does="freeze"))
    assert "rank 1 (host " in outcome.message
    assert f"has given no sign of life for {WATCHDOG_S:g} s (run.watchdog_s)" in outcome.message
    assert outcome.seconds < 25


def test_a_collective_that_times_out_says_where_each_rank_stood(tmp_path):
    outcome = run(tmp_path, lambda group: group.call("actor", "meet_but_rank_1", does="sleep"), gloo_s=3)
    assert "rank 1 in actor.meet_but_rank_1" in outcome.message
    assert "rank 0 in actor.meet_but_rank_1" in outcome.message
    assert outcome.seconds < 25


def test_a_rank_that_lost_what_it_needs_is_named_though_all_are_busy(tmp_path):
    """Its child process is gone; nobody asks the child for anything."""

    def entry():
        rank, world_size, store = join_world(os.environ)
        with Watchdog(store, rank, world_size, tmp_path, WATCHDOG_S, grace_s=2.0) as watchdog:
            if rank == 1:
                child = subprocess.Popen(["sleep", "63"])
                watchdog.watch(lambda: f"the child {child.pid} is gone" if child.poll() is not None else None)
                threading.Timer(2.0, child.kill).start()
            with watchdog.phase("busy"):
                time.sleep(60)
        return 0

    outcome = Launch(tmp_path, 3, entry).wait()
    assert outcome.message.startswith("rank 1 (host ")
    assert "cannot go on in busy: the child " in outcome.message
    assert outcome.seconds < 25


def test_the_drivers_own_exception_is_the_first_cause(tmp_path):
    def drive(group):
        group.call("actor", "where")
        raise KeyError("answer")

    outcome = run(tmp_path, drive)
    assert outcome.message.startswith("rank 0 (host ")
    assert "KeyError: 'answer'" in outcome.message
    assert outcome.seconds < 15


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_signal_to_the_launcher_leaves_nothing_running(tmp_path, number):
    def drive(group):
        group.call("actor", "start_children")
        group.call("actor", "meet_but_rank_1", does="sleep")

    launch = Launch(tmp_path, 3, lambda: world(tmp_path, drive))
    while not (tmp_path / "asleep").exists():
        assert launch.process.is_alive()
        time.sleep(0.05)
    assert len([p for p in psutil.Process().children(recursive=True) if p.name() == "sleep"]) >= 3
    os.kill(launch.process.pid, number)
    outcome = launch.wait()
    assert outcome.code == 128 + number
    assert str(read_failure(tmp_path)) == f"the run was ended by {number.name}"
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] in (["sleep", "61"], ["sleep", "62"])]


def test_the_ranks_die_with_a_launcher_that_is_killed(tmp_path):
    def drive(group):
        (tmp_path / "pids").write_text(json.dumps([a["pid"] for a in group.call("actor", "where")]))
        time.sleep(60)

    launch = Launch(tmp_path, 3, lambda: world(tmp_path, drive))
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        time.sleep(0.05)
    launch.process.kill()
    launch.process.join()
    pids = json.loads((tmp_path / "pids").read_text())
    deadline = time.monotonic() + 2  # sooner than any watchdog
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank outlived its launcher"
        time.sleep(0.05)


def test_children_that_a_rank_leaves_at_a_normal_end_are_ended(tmp_path):
    assert run(tmp_path, lambda group: group.call("actor", "start_children"), world_size=2).code == 0


def test_twenty_short_runs_all_end_with_0(tmp_path):
    def drive(group):
        group.call("actor", "meet")

    for number in range(20):
        outcome = run(tmp_path / str(number), drive, world_size=2)
        assert (outcome.code, outcome.message) == (0, "")


def test_a_failure_of_a_former_run_in_the_same_folder_does_not_end_the_next(tmp_path):
    def fail(group):
        raise KeyError("once")

    assert run(tmp_path, fail, world_size=2).error == "RankFailed"
    assert run(tmp_path, lambda group: group.call("actor", "where"), world_size=2).code == 0


def test_two_launches_at_the_same_moment_do_not_meet(tmp_path):
    def drive(group):
        answers = group.call("actor", "where")
        (tmp_path / f"pids_{os.getppid()}").write_text(json.dumps([a["pid"] for a in answers]))

    launches = [Launch(tmp_path / name, 3, lambda name=name: world(tmp_path / name, drive)) for name in "ab"]
    for launch in launches:
        launch.process.join(40)
    assert [launch.wait().code for launch in launches] == [0, 0]
    first, second = [set(json.loads(path.read_text())) for path in tmp_path.glob("pids_*")]
    assert len(first) == len(second) == 3
    assert not first & second


# -- without our launcher, as under torchrun ---------------------------------------------------------------------------


def start_as_torchrun(run_dir: Path, drive: Callable[[LocalWorkerGroup], None], world_size: int = 3) -> list:
    """Ranks that nobody watches; rank 0 hosts the store on a port that was free a moment ago."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def main(rank):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
        os.environ.update(MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        sys.exit(world(run_dir, drive))

    ranks = [get_context("fork").Process(target=main, args=(rank,)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    return ranks


def exit_codes(ranks: list, timeout_s: float = 25) -> list[int | None]:
    deadline = time.monotonic() + timeout_s
    for process in ranks:
        process.join(max(0, deadline - time.monotonic()))
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
        process.join()
    return codes


def test_torchruns_ranks_end_in_order(tmp_path):
    ranks = start_as_torchrun(tmp_path, lambda group: group.call("actor", "meet"))
    assert exit_codes(ranks) == [0, 0, 0]
    assert read_failure(tmp_path) is None


@pytest.mark.parametrize("victim", [0, 1], ids=["host of the store", "another rank"])
def test_torchruns_ranks_end_when_one_is_killed(tmp_path, victim):
    def drive(group):
        group.call("actor", "where")
        (tmp_path / "ready").touch()
        time.sleep(60)

    ranks = start_as_torchrun(tmp_path, drive)
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    time.sleep(1.5)
    began = time.monotonic()
    ranks[victim].kill()
    codes = exit_codes(ranks)
    assert time.monotonic() - began < 15
    assert codes[victim] == -signal.SIGKILL
    assert [code for rank, code in enumerate(codes) if rank != victim] == [1, 1]
    failure = read_failure(tmp_path)
    assert failure.rank == victim
    assert "is gone" in str(failure)
