"""Which rows of a batch does each rank get, and whose results come back? Pure functions over rank coordinates, no torch.

Rows are split by data-parallel rank; every tensor-, context- and pipeline-parallel rank of one data-parallel rank gets the same
rows. Results are collected from the last stage's first tensor- and context-parallel rank of each data-parallel rank: joined in
data-parallel order they stand in the batch's own order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from megappo.errors import UserError
from megappo.parallel_state.layout import ParallelLayout

Method = TypeVar("Method", bound=Callable[..., object])


class Dispatch(Enum):
    """How a worker method is called and what comes back.

    ALL: each rank gets the same arguments, or tensors of its own; the caller gets the list of the results by rank.
    DP: each rank gets the rows of its data-parallel rank; the method returns (tensors by name, metrics) with one row for each of
    its rows; the caller gets the joined tensors in the batch's order, and the metrics of data-parallel rank 0.
    """

    ALL = "all"
    DP = "dp"


def dispatched(mode: Dispatch) -> Callable[[Method], Method]:
    """Mark a worker method as one that a worker group may call, and say how."""

    def mark(method: Method) -> Method:
        method.dispatch = mode  # type: ignore[attr-defined]
        return method

    return mark


def dispatch_mode(method: object) -> Dispatch | None:
    """The mode that `dispatched` gave to a method; none: the method is not for callers elsewhere."""
    return getattr(method, "dispatch", None)


def split_rows(num_rows: int, dp: int) -> list[slice]:
    """`dp` contiguous slices that cover the rows in order. Sizes differ by at most one, the larger first; some may be empty."""
    size, larger = divmod(num_rows, dp)
    starts = [size * d + min(d, larger) for d in range(dp + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(starts)]


def rows_of_ranks(layout: ParallelLayout, num_rows: int) -> list[slice]:
    """The rows that each rank of the layout gets, by rank."""
    slices = split_rows(num_rows, layout.dp)
    return [slices[layout.coordinates(rank).dp] for rank in range(layout.world_size)]


def collectors(layout: ParallelLayout) -> list[int]:
    """The ranks whose results come back, in data-parallel order: last stage, tp 0, cp 0."""
    return [layout.rank_of(dp=d, pp=layout.pp - 1) for d in range(layout.dp)]


def check_world(layout: ParallelLayout, world_size: int) -> None:
    """Refuse a layout that does not fill the world, with the product that went wrong."""
    if layout.world_size != world_size:
        key = layout.key
        raise UserError(
            f"{key}.tp={layout.tp} x {key}.cp={layout.cp} x {key}.pp={layout.pp} x {key}.dp={layout.dp} = {layout.world_size} "
            f"ranks, but the world has {world_size}; all roles run in the same ranks: change {key} or the number of ranks"
        )
