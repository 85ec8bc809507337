"""How do some ranks talk that need not be in torch's default world? `HostGroup`: gloo over the rendezvous store, host tensors."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

PIECE_BYTES = 256 << 20  # of one broadcast
STATUS_BYTES = 1024  # a flag and what went wrong
TIMEOUT = timedelta(hours=1)  # a watchdog ends a stuck run long before


class HostGroup:
    """ranks: the lead first. rank: this one. All of them make the group, under the same name on the store."""

    def __init__(self, store: Store, name: str, ranks: Sequence[int], rank: int) -> None:
        self.ranks = list(ranks)
        self._own = self.ranks.index(rank)
        self._gloo: Any = ProcessGroupGloo(PrefixStore(name, store), self._own, len(self.ranks), TIMEOUT)

    def broadcast(self, tensor: Tensor, timeout_s: float | None = None) -> None:
        """The lead's tensor, to all."""
        options = BroadcastOptions()
        options.rootRank = 0
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        self._gloo.broadcast([tensor], options).wait()

    def broadcast_bytes(self, data: Tensor) -> None:
        for piece in torch.split(data, PIECE_BYTES):
            if piece.numel():
                self.broadcast(piece)

    def meet(self) -> None:
        """All wait for each other."""
        self._gloo.allreduce([torch.zeros(1)]).wait()

    def tell_all(self, error: Exception | None) -> dict[int, str]:
        """What every rank that failed says, by rank. All ranks call it."""
        text = b"" if error is None else (str(error) or type(error).__name__).encode()
        own = torch.zeros(STATUS_BYTES, dtype=torch.uint8)
        own[0] = error is not None
        if text:
            shown = torch.frombuffer(bytearray(text[: STATUS_BYTES - 1]), dtype=torch.uint8)
            own[1 : 1 + len(shown)] = shown
        told = [torch.empty_like(own) for _ in self.ranks]
        self._gloo.allgather([told], [own]).wait()
        said = {rank: status.numpy().tobytes() for rank, status in zip(self.ranks, told, strict=True)}
        return {rank: status[1:].rstrip(b"\0").decode(errors="ignore") for rank, status in said.items() if status[0]}

    def close(self) -> None:
        self._gloo = None
