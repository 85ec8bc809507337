"""How fast and how even are groups of samples? Ours beside verl's balance and NeMo-RL's packing; correctness first. One process.

    python -m benchmarks.algorithms_batches FILE    the measurements, as JSON; `rows` makes rows of them

Of each comparison the kind of lengths counts that is worst for ours. Both sides get lists and give lists.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.parts import Found
from benchmarks.peers import nemo, optional, verl, versions
from benchmarks.report import Row, beside, over, row, unjudged
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


def rows(found: Found) -> list[Row]:
    """The rows of the table; for information, how even groups are where verl's are least so, and the number of packed groups."""
    balance, packing = found["balance"], found["packing"]
    return [
        beside("balance_time_vs_verl", worst(balance), "verl", 5),
        *balance_rows([pair for kind in balance.values() for pair in kind["imbalance"]]),
        beside("packing_vs_nemo", worst(packing), "nemo", 2.5),
        *packing_rows([pair for kind in packing.values() for pair in kind["groups"]]),
    ]


def worst(kinds: dict[str, Any]) -> dict[str, float]:
    """The seconds of the kind of lengths that suits ours least."""
    return min((kind["seconds"] for kind in kinds.values()), key=lambda pair: pair.get("peer", 1.0) / pair["ours"])


def balance_rows(pairs: list[list[float]]) -> list[Row]:
    """pairs: (max/mean - 1 of ours, of verl's where it is there) of each batch."""
    if any(len(pair) < 2 for pair in pairs):
        own = max(pair[0] for pair in pairs)
        return [unjudged("balance_excess_over_verl", own, "of the mean", "<= 1e-05 of the mean above verl's", "verl")]
    long_tail = max(pairs, key=lambda pair: pair[1])
    return [
        row("balance_excess_over_verl", max(ours - theirs for ours, theirs in pairs), "of the mean", at_most=1e-5),
        row("balance_long_tail_vs_verl", long_tail[0], "of the mean", long_tail[1]),
    ]


def packing_rows(pairs: list[list[int]]) -> list[Row]:
    """pairs: (groups of ours, of NeMo-RL's where it is there) of each batch."""
    if any(len(pair) < 2 for pair in pairs):
        return [unjudged("packing_groups_over_nemo", max(pair[0] for pair in pairs), "groups", "ratio <= 1", "nemo")]
    ours, theirs = max(pairs, key=lambda pair: pair[0] / pair[1])
    return [over("packing_groups_over_nemo", ours, "groups", theirs, at_most=1)]


def lengths(kind: str, n: int, seed: int) -> list[int]:
    found: list[int] = LENGTHS[kind](np.random.default_rng(seed), n).astype(np.int64).clip(min=1).tolist()
    return found


def timed(contestants: dict[str, Callable[[list[int]], Lists]], batches: list[list[int]]) -> dict[str, float]:
    """Median seconds of each, over the batches, one after the other."""
    turns: dict[str, Iterator[list[int]]] = {name: itertools.cycle(batches) for name in contestants}
    return contest(
        {name: lambda name=name, run=run: run(next(turns[name])) for name, run in contestants.items()}, len(batches), warm_up=1
    )


def covers(groups: Lists, n: int) -> bool:
    return sorted(itertools.chain.from_iterable(groups)) == list(range(n))


def beside_verl() -> Found:
    theirs = optional(verl, verl.load_balance)
    contestants = {"ours": lambda batch: get_seqlen_balanced_partitions(batch, RANKS, equal_size=True)}
    if theirs is not None:
        contestants["peer"] = lambda batch: theirs(batch, RANKS, True)
    found = {}
    for kind in LENGTHS:
        batches = [lengths(kind, BALANCED, seed) for seed in range(SEEDS)]
        pairs = []
        for batch in batches:
            groups = [run(batch) for run in contestants.values()]
            for name, made in zip(contestants, groups, strict=True):
                equal = all(len(group) == BALANCED // RANKS for group in made)
                assert covers(made, BALANCED) and equal, f"{name}: no equal partition"
            pairs.append([imbalance(batch, made) for made in groups])
        found[kind] = {"seconds": timed(contestants, batches), "imbalance": pairs}
    return found


def beside_nemo() -> Found:
    theirs = optional(nemo, nemo.load_packer)
    contestants = {"ours": lambda batch: pack_by_tokens(batch, BUDGET)}
    if theirs is not None:
        contestants["peer"] = lambda batch: theirs(batch, BUDGET)
    found = {}
    for kind in LENGTHS:
        batches = [[min(length, BUDGET) for length in lengths(kind, PACKED, seed)] for seed in range(PACK_SEEDS)]
        pairs = []
        for batch in batches:
            groups = [run(batch) for run in contestants.values()]
            for name, made in zip(contestants, groups, strict=True):
                fits = max(sum(batch[i] for i in group) for group in made) <= BUDGET
                assert covers(made, PACKED) and fits, f"{name}: no packing"
            pairs.append([len(made) for made in groups])
        found[kind] = {"seconds": timed(contestants, batches), "groups": pairs}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps({"balance": beside_verl(), "packing": beside_nemo(), "peers": versions}))
