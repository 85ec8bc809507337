"""How are contestants on several ranks timed? Turn by turn, from a start that all ranks share to the last rank's end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

LEAD_S = 0.005  # from the word to the start: all ranks have it by then


def contest(contestants: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, float]:
    """Median seconds of each, on all ranks. They alternate, so that other load on the machine meets all of them.

    One turn lasts from the common start until the last rank is done. Called by all ranks; the clock must be one for all of them
    (one host: Linux's monotonic clock is)."""
    for _ in range(warm_up):
        for run in contestants.values():
            run()
    elapsed = torch.zeros(len(contestants), rounds, dtype=torch.float64)
    for number in range(rounds):
        for which, run in enumerate(contestants.values()):
            start = _common_start()
            run()
            elapsed[which, number] = time.perf_counter() - start
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return {name: statistics.median(times) for name, times in zip(contestants, elapsed.tolist(), strict=True)}


def _common_start() -> float:
    """Return at a moment that all ranks have agreed on."""
    is_parallel = dist.is_initialized() and dist.get_world_size() > 1
    if is_parallel:
        dist.barrier()  # a rank that is still in the turn before would be late, and its lateness count against this one
    start = torch.tensor([time.perf_counter() + LEAD_S], dtype=torch.float64)
    if is_parallel:
        dist.broadcast(start, src=0)
    at = float(start)
    time.sleep(max(0.0, at - time.perf_counter()))
    return at
