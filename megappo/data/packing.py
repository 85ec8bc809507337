"""How do samples of any length become micro-batches that fit in memory? By token budget: `pack_by_tokens`, `plan_batch`.

A plan is made once, where all lengths are known, for all data-parallel ranks: each gets as many samples as the others (or one
fewer) at nearly equal cost, and the same number of micro-batches, none above the budget. So no rank asks another, in no pass.

legend: b samples of the batch, M micro-batches of a rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megappo.data.balance import Costs, get_seqlen_balanced_partitions, groups_of, imbalance, rebalance, small_first

FULLEST_ITEMS = 2048
"""Samples up to which a second, slower packing is tried where the first one may not be the best."""


def pack_by_tokens(lengths: Costs, budget: int) -> list[list[int]]:
    """As few groups as first-fit decreasing finds, or fewer, whose lengths sum to at most `budget`; each index once.

    A sample above the budget is an error."""
    tokens = np.asarray(lengths, dtype=np.int64)
    if budget < 1:
        raise ValueError(f"a token budget of {budget} holds nothing; give 1 or more")
    if not len(tokens):
        return []
    if tokens.min() < 0:
        raise ValueError(f"sample {tokens.argmin()} has {tokens.min()} tokens")
    longest = int(tokens.max())
    if longest > budget:
        raise ValueError(f"a sample of {longest} tokens is above micro_batch_tokens={budget}; raise it to {longest} or more")
    from megappo.data import balance_loops as loops  # numba, which only who packs needs

    order = small_first(-tokens)
    descending = tokens[order]
    group = loops.first_fit(descending, budget)
    count = int(group.max()) + 1
    if count > -(-int(descending.sum()) // budget) and len(tokens) <= FULLEST_ITEMS:
        fullest = loops.fullest_fit(descending, budget)
        if fullest.max() < group.max():
            group, count = fullest, int(fullest.max()) + 1
    return groups_of(group, order, count)


def micro_batches(lengths: Costs, budget: int, count: int, costs: Costs | None = None) -> list[list[int]]:
    """Exactly `count` groups of at most `budget` tokens and nearly equal cost (tokens, where no other is given).

    count: at least what `pack_by_tokens` needs. Groups are empty only where there are fewer samples than groups."""
    tokens = np.asarray(lengths, dtype=np.int64)
    costs = tokens if costs is None else costs
    groups = get_seqlen_balanced_partitions(costs, count, equal_size=False)
    if any(
        tokens[group].sum() > budget for group in groups
    ):  # equal cost need not be equal tokens, nor do few samples fit equally
        packed = pack_by_tokens(tokens, budget)
        if len(packed) > count:
            raise ValueError(f"{len(tokens)} samples need {len(packed)} micro-batches of {budget} tokens, not {count}")
        groups = rebalance(costs, tokens, packed + [[] for _ in range(count - len(packed))], budget)
    return groups


@dataclass(frozen=True)
class BatchPlan:
    """Which rank and which micro-batch each sample of a batch goes to.

    A batch that is put in `order` can be cut into one slice for each data-parallel rank; results come back in that order."""

    order: list[int]
    """(b,) sample that stands at each place"""
    rank_rows: list[int]
    """(dp,) samples of each data-parallel rank: they differ by at most one, the larger first"""
    micro_batch: list[int]
    """(b,) number of the micro-batch, on its rank, of the sample at each place"""
    num_micro_batches: int
    """M, the same on every rank"""

    @property
    def restore(self) -> list[int]:
        """(b,) place at which each sample stands: what indexes results so that they are in the batch's own order."""
        places = [0] * len(self.order)
        for place, sample in enumerate(self.order):
            places[sample] = place
        return places

    def ranks(self) -> list[list[int]]:
        """The samples of each data-parallel rank."""
        ends = np.cumsum(self.rank_rows).tolist()
        return [self.order[end - size : end] for size, end in zip(self.rank_rows, ends, strict=True)]

    def groups(self) -> list[list[list[int]]]:
        """The samples of each micro-batch of each data-parallel rank; a group may be empty."""
        numbers = iter(self.micro_batch)
        groups: list[list[list[int]]] = [[[] for _ in range(self.num_micro_batches)] for _ in self.rank_rows]
        for samples, of_rank in zip(self.ranks(), groups, strict=True):
            for sample in samples:
                of_rank[next(numbers)].append(sample)
        return groups

    def describe(self, costs: Costs) -> dict[str, float]:
        """How unequal the plan leaves data-parallel ranks and micro-batches, see `imbalance`."""
        groups = [group for rank in self.groups() for group in rank]
        return {"dp_imbalance": imbalance(costs, self.ranks()), "micro_batch_imbalance": imbalance(costs, groups)}


def plan_batch(
    lengths: Costs,
    dp: int = 1,
    *,
    budget: int | None = None,
    size: int | None = None,
    multiple: int = 1,
    costs: Costs | None = None,
) -> BatchPlan:
    """The plan of a pass over samples of these lengths (tokens).

    budget: tokens of a micro-batch; else size: samples of one. multiple: M is a multiple of it, and at least one of it (the
    stages, with an interleaved schedule). costs: what is made equal, if it is not tokens. Raises ValueError for a sample above
    the budget."""
    if (budget is None) == (size is None):
        raise ValueError(f"give a token budget or a size of micro-batches, not budget={budget} and size={size}")
    if dp < 1 or multiple < 1 or (size is not None and size < 1):
        raise ValueError(f"dp={dp}, multiple={multiple} and size={size} must be 1 or more")
    tokens = np.asarray(lengths, dtype=np.int64)
    weights = np.asarray(tokens if costs is None else costs, dtype=np.float64)
    if len(weights) != len(tokens):
        raise ValueError(f"{len(weights)} costs for {len(tokens)} samples")
    ranks = [np.array(rank, dtype=np.int64) for rank in get_seqlen_balanced_partitions(weights, dp, equal_size=True)]
    if budget is not None:
        needed = max(len(pack_by_tokens(tokens[rank], budget)) for rank in ranks)
    else:
        needed = max(-(-len(rank) // (size or 1)) for rank in ranks)
    count = max(1, -(-needed // multiple)) * multiple
    order: list[int] = []
    micro_batch: list[int] = []
    for rank in ranks:
        if budget is not None:
            groups = micro_batches(tokens[rank], budget, count, weights[rank])
        else:
            groups = get_seqlen_balanced_partitions(weights[rank], count, equal_size=True)
        numbers = np.zeros(len(rank), dtype=np.int64)
        for number, group in enumerate(groups):
            numbers[group] = number
        order += rank.tolist()
        micro_batch += numbers.tolist()
    return BatchPlan(order, [len(rank) for rank in ranks], micro_batch, count)


def groups_by_number(numbers: Sequence[int], count: int) -> list[list[int]]:
    """The places of each number 0..count-1: a rank's micro-batches from its rows of the column `BatchPlan.micro_batch`."""
    groups: list[list[int]] = [[] for _ in range(count)]
    for place, number in enumerate(numbers):
        groups[number].append(place)
    return groups
