"""What does the trainer ask of a group of workers, and how does one rank carry out a call? `WorkerGroup`, `perform`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megappo.controller.colocate import ColocatedWorker
from megappo.controller.dispatch import Dispatch, dispatch_mode
from megappo.controller.wire import plain

Tensors = dict[str, Tensor]


class WorkerGroup(Protocol):
    """All ranks, as the driver sees them."""

    world_size: int

    def call(
        self,
        role: str,
        method: str,
        /,
        tensors: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a role's method on every rank where the role lives.

        Dispatch.DP: `tensors` are split by rows; returns (tensors, metrics) with the rows in the order of the batch.
        Dispatch.ALL: every rank gets all of `tensors` (if given), or its own where they are a list by rank; returns the list of
        results by rank.
        The tensors that a worker gets are its own: it may write to them and keep them.
        kwargs: numbers, strings, booleans, None, lists, dicts.
        Raises RunFailed with the first cause where a rank fails, UserError where it is one that the user can mend.
        """
        ...

    def close(self) -> None:
        """Tell all ranks that the run is over."""
        ...


def perform(
    worker: ColocatedWorker, role: str, method: str, tensors: Tensors | None, kwargs: dict[str, Any], is_collector: bool
) -> tuple[Any, Tensors | None]:
    """This rank's share of a call: (value, tensors) as they travel back; (None, None) where nobody collects them."""
    target = worker.method(role, method)
    result = target(**kwargs) if tensors is None else target(tensors, **kwargs)
    if not is_collector:
        return None, None
    if _is_pair(result):
        value, found = result[1], result[0]
    else:
        value, found = result, None
    if dispatch_mode(target) is Dispatch.DP:
        if found is None:
            raise TypeError(f"{role}.{method} must return (dict of tensors, metrics), not {type(result).__name__}")
        check_rows(found, num_rows(tensors or {}), f"{role}.{method} returned")
    return plain(value, f"what {role}.{method} returned"), found


def num_rows(tensors: Mapping[str, Tensor]) -> int:
    """Rows of a batch; all its tensors must have as many."""
    counts = {name: tensor.shape[0] if tensor.dim() else None for name, tensor in tensors.items()}
    if not counts or None in counts.values() or len(set(counts.values())) > 1:
        raise ValueError(f"a batch needs tensors that all have the same number of rows, not {counts}")
    return next(iter(tensors.values())).shape[0]


def check_rows(tensors: Mapping[str, Tensor], expected: int, what: str) -> None:
    for name, tensor in tensors.items():
        if not tensor.dim() or tensor.shape[0] != expected:
            shape = tuple(tensor.shape)
            raise ValueError(f"{what} {name!r} of shape {shape}: it must hold one row for each of the {expected} rows given")


def join_rows(parts: list[Tensors], what: str) -> Tensors:
    """The collectors' tensors one below the other: the batch's own order, since rows were split in data-parallel order."""
    names = set(parts[0])
    for part in parts:
        if set(part) != names:
            raise ValueError(f"{what}: one data-parallel rank returned {sorted(names)}, another {sorted(part)}")
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _is_pair(result: Any) -> bool:
    return (
        isinstance(result, tuple)
        and len(result) == 2
        and isinstance(result[0], dict)
        and all(isinstance(tensor, Tensor) for tensor in result[0].values())
    )
