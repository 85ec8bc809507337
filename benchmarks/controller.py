"""What does one call to 4 ranks and back cost? Ours over sockets against broadcast_object_list and gather_object over gloo.

    python -m benchmarks.controller

Blocks of both alternate in one run, so that other load on the machine meets both; the median is reported.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.report import Row, report, row
from megappo.controller.colocate import create_colocated_worker
from megappo.controller.dispatch import Dispatch, dispatched
from megappo.controller.launch import join_world, launch_local
from megappo.controller.local_group import LocalWorkerGroup, serve
from megappo.controller.watchdog import Watchdog
from megappo.parallel_state.layout import ParallelLayout

WORLD_SIZE, BLOCKS, CALLS = 4, 12, 40
SAMPLES, WIDTH = 64, 640


def answer(rank: int, request: dict[str, Any]) -> dict[str, Any]:
    return {"rank": rank, "next": request["step"] + 1}


def log_probs(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stands for a real pass: something of the right shape, and next to no work."""
    return {"log_probs": tensors["input_ids"].float()}


class Worker:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    @dispatched(Dispatch.ALL)
    def step(self, step: int) -> dict[str, Any]:
        return answer(self.rank, {"step": step})

    @dispatched(Dispatch.DP)
    def log_probs(self, tensors: dict[str, torch.Tensor], step: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        return log_probs(tensors), answer(self.rank, {"step": step})

    @dispatched(Dispatch.ALL)
    def gloo_steps(self, calls: int) -> list[float]:
        """The peer: the same request and answers as pickled objects through collectives."""
        request = {"step": 1} if self.rank == 0 else None
        return [_timed(lambda: gloo_call(request, self.rank)) for _ in range(calls)]

    @dispatched(Dispatch.ALL)
    def gloo_log_probs(self, calls: int) -> list[float]:
        request = {"step": 1, "tensors": batch()} if self.rank == 0 else None
        return [_timed(lambda: gloo_call(request, self.rank)) for _ in range(calls)]


def gloo_call(request: dict[str, Any] | None, rank: int) -> list[dict[str, Any]] | None:
    box = [request]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    reply = answer(rank, box[0])
    if "tensors" in box[0]:  # tp 1, pp 2, dp 2, as ours: each data-parallel rank takes its half
        rows = slice(0, SAMPLES // 2) if rank % 2 == 0 else slice(SAMPLES // 2, SAMPLES)
        found = log_probs({name: tensor[rows] for name, tensor in box[0]["tensors"].items()})
        reply["tensors"] = found if rank >= 2 else None
    replies: list[Any] | None = [None] * WORLD_SIZE if rank == 0 else None
    dist.gather_object(reply, replies, dst=0)
    return replies


def batch() -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.arange(SAMPLES * WIDTH).reshape(SAMPLES, WIDTH) % 50_000,
        "attention_mask": torch.ones(SAMPLES, WIDTH, dtype=torch.bool),
        "sample_ids": torch.arange(SAMPLES),
    }


def measure(group: LocalWorkerGroup) -> list[Row]:
    given = batch()
    assert group.call("actor", "step", step=7) == [{"rank": rank, "next": 8} for rank in range(WORLD_SIZE)]
    tensors, metrics = group.call("actor", "log_probs", given, step=7)
    assert torch.equal(tensors["log_probs"], given["input_ids"].float())
    assert metrics == {"rank": 2, "next": 8}

    times: dict[str, list[float]] = {"step": [], "gloo_steps": [], "log_probs": [], "gloo_log_probs": []}
    for _ in range(BLOCKS):
        times["step"] += [_timed(lambda: group.call("actor", "step", step=1)) for _ in range(CALLS)]
        times["gloo_steps"] += group.call("actor", "gloo_steps", calls=CALLS)[0]
        times["log_probs"] += [_timed(lambda: group.call("actor", "log_probs", given, step=1)) for _ in range(CALLS // 4)]
        times["gloo_log_probs"] += group.call("actor", "gloo_log_probs", calls=CALLS // 4)[0]
    ours = {name: statistics.median(values) * 1000 for name, values in times.items()}
    size = sum(tensor.nbytes for tensor in given.values()) / 2**20
    return [
        row(f"one call to {WORLD_SIZE} ranks and back", ours["step"], "ms", ours["gloo_steps"], at_most=0.3),
        row(f"the same with a batch of {size:.2f} MiB", ours["log_probs"], "ms", ours["gloo_log_probs"]),
    ]


def _timed(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def rank_main(run_dir: Path) -> int:
    rank, world_size, store = join_world(os.environ)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    with Watchdog(store, rank, world_size, run_dir) as watchdog:
        worker = create_colocated_worker({"actor": Worker(rank)})
        if rank != 0:
            serve(worker, watchdog)
            return 0
        with LocalWorkerGroup({"actor": ParallelLayout(num_layers=2, pp=2, dp=2)}, worker, watchdog) as group:
            rows = measure(group)
        report("controller", rows, packages=("torch", "pyzmq"))
    return 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        raise SystemExit(launch_local(WORLD_SIZE, lambda: rank_main(Path(folder)), folder))
