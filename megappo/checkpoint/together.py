"""How do all ranks do a step together, or learn together why one of them could not? `together`, `on_rank_0`.

Without it, a rank that fails on its own leaves the others waiting in the next collective.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megappo.errors import RunFailed, UserError
from megappo.pp_weights.transport import gather_objects

T = TypeVar("T")


def together(what: str, action: Callable[[], T]) -> T:
    """Run `action` on this rank; every rank must call this. If any rank's raised, all raise: UserError where that was one,
    else RunFailed that says `what` failed, on which rank, and why."""
    result: T | None = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as raised:  # noqa: BLE001 - every rank raises it below
        error = raised
    told = None if error is None else (isinstance(error, UserError), _told(error))
    for rank, other in enumerate(gather_objects(told, dist.get_world_size())):
        if other is not None:
            is_user_error, text = other
            raise (UserError(text) if is_user_error else RunFailed(f"{what} failed on rank {rank}: {text}")) from error
    return result  # type: ignore[return-value]


def on_rank_0(what: str, action: Callable[[], object]) -> None:
    """Run `action` on rank 0 alone; every rank must call this, and all raise if it did."""
    together(what, action if dist.get_rank() == 0 else lambda: None)


def cause_of(what: str, error: CheckpointException) -> RunFailed:
    """torch.distributed.checkpoint shares failures by itself: the first one, in the words of `together`."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    return RunFailed(f"{what} failed on rank {rank}: {_told(cause)}")


def _told(error: BaseException) -> str:
    if isinstance(error, RunFailed | UserError):
        return str(error)
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return f"{type(error).__name__}: {error}" + ("; free some space and start again" if full else "")
