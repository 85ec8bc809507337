"""How fast and how even are groups of samples? Ours beside verl's balance and NeMo-RL's packing; correctness first. One process.

    python -m benchmarks.algorithms_batches FILE    the measurements, as JSON; `rows()` runs that under MEGAPPO_PEERS_PY

Of each comparison the kind of lengths counts that is worst for ours. Both sides get lists and give lists.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.peers.nemo import load_packer
from benchmarks.report import Row, over, row
from benchmarks.timing import contest
from megappo.data.balance import get_seqlen_balanced_partitions, imbalance
from megappo.data.packing import pack_by_tokens

SEEDS, BALANCED, RANKS = 15, 10_240, 64
PACKED, BUDGET, PACK_SEEDS = 10_000, 8192, 5
LENGTHS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "lognormal": lambda g, n: g.lognormal(6, 1, n),
    "capped": lambda g, n: g.lognormal(6, 1, n).clip(max=2048),
    "uniform": lambda g, n: g.uniform(1, BUDGET, n),
}

Lists = list[list[int]]


def rows() -> list[Row]:
    """The rows of the issue's table, and the number of groups that packing makes."""
    from benchmarks.weights import run

    found = run("algorithms_batches", python=os.environ.get("MEGAPPO_PEERS_PY", sys.executable))
    made = []
    if "verl" in found:  # else its absence was said
        seconds, excess = worst(found["verl"]["seconds"]), found["verl"]["excess"]
        made = [
            row("balance_time_vs_verl", seconds["ours"] * 1e3, "ms", seconds["peer"] * 1e3, min_ratio=5),
            row("balance_excess_over_verl", max(excess.values()), "of the mean", at_most=1e-5),
            row("balance_long_tail_vs_verl", *found["verl"]["long_tail"]),
        ]
    if "nemo" in found:
        seconds, groups = worst(found["nemo"]["seconds"]), found["nemo"]["groups"]
        most = max(groups, key=lambda pair: pair[0] / pair[1])
        made += [
            row("packing_vs_nemo", seconds["ours"] * 1e3, "ms", seconds["peer"] * 1e3, min_ratio=2.5),
            over("packing_groups_over_nemo", most[0], "groups", most[1], at_most=1),
        ]
    return made


def worst(seconds: dict[str, dict[str, float]]) -> dict[str, float]:
    return min(seconds.values(), key=lambda pair: pair["peer"] / pair["ours"])


def lengths(kind: str, n: int, seed: int) -> list[int]:
    found: list[int] = LENGTHS[kind](np.random.default_rng(seed), n).astype(np.int64).clip(min=1).tolist()
    return found


def timed(ours: Callable[[list[int]], Lists], theirs: Callable[[list[int]], Lists], batches: list[list[int]]) -> dict[str, float]:
    """Median seconds of both, over the batches, one after the other."""
    turns: tuple[Iterator[list[int]], ...] = tuple(itertools.cycle(batches) for _ in range(2))
    contestants = {"ours": lambda: ours(next(turns[0])), "peer": lambda: theirs(next(turns[1]))}
    return contest(contestants, len(batches), warm_up=1)


def covers(groups: Lists, n: int) -> bool:
    return sorted(itertools.chain.from_iterable(groups)) == list(range(n))


def beside_verl() -> dict[str, Any]:
    try:
        from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions as theirs
    except ImportError as error:
        print(f"peer verl: skipped (not installed): {error}")
        return {}
    seconds, excess, long_tail = {}, {}, (0.0, "of the mean", 0.0)
    for kind in LENGTHS:
        batches = [lengths(kind, BALANCED, seed) for seed in range(SEEDS)]
        above = []
        for batch in batches:
            mine = get_seqlen_balanced_partitions(batch, RANKS, equal_size=True)
            assert covers(mine, BALANCED) and all(len(group) == BALANCED // RANKS for group in mine), "ours is no equal partition"
            pair = imbalance(batch, mine), imbalance(batch, theirs(batch, RANKS, True))
            above.append(pair[0] - pair[1])
            if pair[1] > long_tail[2]:
                long_tail = pair[0], "of the mean", pair[1]
        excess[kind] = max(above)
        seconds[kind] = timed(
            lambda batch: get_seqlen_balanced_partitions(batch, RANKS, equal_size=True),
            lambda batch: theirs(batch, RANKS, True),
            batches,
        )
    return {"verl": {"seconds": seconds, "excess": excess, "long_tail": long_tail}}


def beside_nemo() -> dict[str, Any]:
    try:
        theirs = load_packer()
    except ImportError as error:
        print(f"peer nemo: skipped: {error}")
        return {}
    seconds, groups = {}, []
    for kind in LENGTHS:
        batches = [[min(length, BUDGET) for length in lengths(kind, PACKED, seed)] for seed in range(PACK_SEEDS)]
        for batch in batches:
            mine = pack_by_tokens(batch, BUDGET)
            assert covers(mine, PACKED) and max(sum(batch[i] for i in group) for group in mine) <= BUDGET, "ours is no packing"
            groups.append((len(mine), len(theirs(batch, BUDGET))))
        seconds[kind] = timed(lambda batch: pack_by_tokens(batch, BUDGET), lambda batch: theirs(batch, BUDGET), batches)
    return {"nemo": {"seconds": seconds, "groups": groups}}


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps(beside_verl() | beside_nemo()))
