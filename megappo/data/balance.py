"""Which samples go together so that all groups cost the same? `get_seqlen_balanced_partitions`, over dp ranks or micro-batches.

Costs are token counts, or FLOPs (`sequence_flops`) where sequences are so long that attention shows. The groups come from largest
differencing and are then refined by moves and swaps, so the largest is never above what differencing alone gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Costs = Sequence[int] | Sequence[float] | npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

DIFFERENCING_CELLS = 1 << 20
"""Items x groups up to which groups of free size begin with differencing (milliseconds); above, it costs more than it gains."""


def get_seqlen_balanced_partitions(costs: Costs, k: int, equal_size: bool) -> list[list[int]]:
    """k ascending lists of indices that hold each index of `costs` once and whose sums are as equal as can be, the longer first.

    costs: token counts or any other cost of each sample, 0 or more. equal_size: the groups' sizes differ by at most one. Groups
    are empty only where there are fewer samples than groups. The same costs give the same groups everywhere."""
    ordered, order = _descending(costs)
    if k < 1:
        raise ValueError(f"cannot make k={k} groups; k must be 1 or more")
    n = len(order)
    group = _start(ordered, k, equal_size)
    smallest, largest = (n // k, -(-n // k)) if equal_size else (min(1, n // k), n)
    tokens = np.zeros(n, dtype=np.int64)
    _improve(ordered, group, k, smallest, largest, tokens, budget=0)
    return groups_of(group, order, k)


def sequence_flops(lengths: Costs, num_parameters: int, num_layers: int, attention_width: int) -> Floats:
    """FLOPs of a forward pass over each sequence: 2 P L of the matrices and 2 N w L^2 of causal attention, half of both products.

    num_parameters: P, those that a token is multiplied with. attention_width: w, attention heads x size of a head."""
    tokens = np.asarray(lengths, dtype=np.float64)
    return 2.0 * num_parameters * tokens + 2.0 * num_layers * attention_width * tokens**2


def imbalance(costs: Costs, groups: Sequence[Sequence[int]]) -> float:
    """How much longer all groups take than they had to: the largest sum over the mean one, minus 1. Nothing to do: 0."""
    array = np.asarray(costs, dtype=np.float64)
    sums = [math.fsum(array[list(group)].tolist()) for group in groups]
    mean = sum(sums) / len(sums) if sums else 0.0
    return max(sums) / mean - 1 if mean else 0.0


def rebalance(costs: Costs, tokens: Costs, groups: Sequence[Sequence[int]], budget: int) -> list[list[int]]:
    """`groups` with their costs made more equal by moves and swaps that keep each at no more than `budget` tokens.

    An empty group gets samples where another has several."""
    ordered, order = _descending(costs)
    member = np.empty(len(order), dtype=np.int64)
    for number, items in enumerate(groups):
        member[np.asarray(items, dtype=np.int64)] = number
    group = member[order]
    smallest = min(1, len(order) // len(groups)) if groups else 0
    _improve(ordered, group, len(groups), smallest, len(order), np.asarray(tokens, dtype=np.int64)[order], budget)
    return groups_of(group, order, len(groups))


def groups_of(group: Ints, order: Ints, k: int) -> list[list[int]]:
    """The lists of `order`'s entries by their group: each ascending, the longer lists first, of equal ones the earlier."""
    member = np.empty(len(order), dtype=np.int64)
    member[order] = group
    sizes = np.bincount(member, minlength=k)
    ends = np.cumsum(sizes)
    members = small_first(member)
    first = np.append(members, len(order))[ends - sizes]
    lists = members.tolist()
    starts, stops = (ends - sizes).tolist(), ends.tolist()
    return [lists[starts[g] : stops[g]] for g in np.lexsort((first, -sizes)).tolist()]


def small_first(values: Ints) -> Ints:
    """The indices of whole numbers from the smallest up, of equal ones the earlier first; fast where they span few values."""
    if len(values) and values.max() - values.min() < 1 << 16:
        values = (values - values.min()).astype(np.uint16)  # numpy sorts these by radix
    return np.argsort(values, kind="stable")


def _descending(costs: Costs) -> tuple[Floats, Ints]:
    """The costs from the largest down, of equal ones the earlier first, and the index of each."""
    array = np.asarray(costs, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"costs must be one number a sample, not an array of shape {array.shape}")
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(wrong):
        raise ValueError(f"sample {wrong[0]} costs {array[wrong[0]]:g}; costs must be finite and not negative")
    whole = bool((array == np.floor(array)).all() and (array < 1 << 62).all())
    order = small_first(-array.astype(np.int64)) if whole else np.argsort(-array, kind="stable")
    return array[order], order


def _start(ordered: Floats, k: int, equal_size: bool) -> Ints:
    from megappo.data import balance_loops as loops  # numba, which only who balances needs

    n = len(ordered)
    group: Ints
    if equal_size:
        filled = np.concatenate((ordered, np.zeros(-n % k)))  # stand-ins make whole rows of k; at most one a group
        group = loops.difference(filled, k, k)[:n]
    elif n * k <= DIFFERENCING_CELLS:
        group = loops.difference(ordered, k, 1)
    else:
        group = loops.largest_first(ordered, k)
    return np.ascontiguousarray(group)


def _improve(ordered: Floats, group: Ints, k: int, smallest: int, largest: int, tokens: Ints, budget: int) -> None:
    """Refine the groups in place, after none is empty that need not be."""
    from megappo.data import balance_loops as loops

    if not len(ordered):
        return
    _fill_empty(ordered, group, k)
    mean = math.fsum(ordered.tolist()) / k
    floor = max(math.ceil(mean) if np.all(ordered == np.floor(ordered)) else mean, ordered[0])
    loops.refine(ordered, group, k, smallest, largest, tokens, budget, floor, 1000 + 20 * k)


def _fill_empty(ordered: Floats, group: Ints, k: int) -> None:
    """Give each empty group the cheapest sample of the most costly group that has several, as long as there is one."""
    sizes = np.bincount(group, minlength=k)
    for empty in np.flatnonzero(sizes == 0):
        if sizes.max() < 2:
            break
        sums = np.bincount(group, weights=ordered, minlength=k)
        giver = np.argmax(np.where(sizes > 1, sums, -1.0))
        item = np.flatnonzero(group == giver)[-1]
        group[item] = empty
        sizes[giver] -= 1
        sizes[empty] = 1
