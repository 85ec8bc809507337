"""How does a model leave its device while the engine generates? `ModelMemory`: `offload` empties storages, `onload` fills them.

What moves are storages, not tensors: the bytes go to the host, and the storage keeps its identity with no bytes. Parameters,
their views in Megatron's buffers, and the optimizer's shards are views of storages, so all of them are whole again once the bytes
are back, and a storage that several tensors share moves once. Only this rank's memory is concerned: nothing is a collective.

Bytes that are about to be overwritten, or that the host already has, do not move:
- gradients: the next update zeroes them first;
- what has not changed since it was last copied to the host. That is not believed but looked at, by a sum over the bytes where
  they lie: an optimizer, a load and a write through `.data` leave no common mark on a tensor;
- what will be loaded anew: `onload(..., keep=False)`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megappo.errors import RunFailed
from megappo.parallel_state.device import has_cuda

Kind = Literal["parameters", "gradients", "optimizer"]
KINDS: tuple[Kind, ...] = ("parameters", "gradients", "optimizer")
"""A storage that is reached by several kinds belongs to the first: Megatron's fp32 shards are views of the parameters."""

_LARGEST_PIECE, _SMALLEST_PIECE = 1 << 26, 1 << 20  # 64 MiB, 1 MiB
_BLOCK_WORDS = 1 << 20


@dataclass(frozen=True)
class Moved:
    """What on- and off-loads did. dropped: bytes that left the device without a copy. Seconds are the caller's: on CUDA a copy to
    the device may still run."""

    to_host_bytes: int = 0
    dropped_bytes: int = 0
    to_device_bytes: int = 0
    offload_s: float = 0.0
    onload_s: float = 0.0

    @property
    def offloaded_bytes(self) -> int:
        """Bytes by which the device's memory shrank."""
        return self.to_host_bytes + self.dropped_bytes

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.to_host_bytes + other.to_host_bytes,
            self.dropped_bytes + other.dropped_bytes,
            self.to_device_bytes + other.to_device_bytes,
            self.offload_s + other.offload_s,
            self.onload_s + other.onload_s,
        )


class ModelMemory:
    """The memory of one model on this rank. tensors: the tensors of a kind as they are now (`PipelineModel.tensors`).

    Host copies are made once, page-locked where the device is CUDA, and kept: the next off-load of a storage writes into the same
    memory. moved: the sum of all on- and off-loads since the caller last set it back.
    """

    def __init__(self, tensors: Callable[[Kind], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self._copies: dict[Kind, dict[StorageWeakRef, _HostCopy]] = {kind: {} for kind in KINDS}
        self._away: dict[Kind, list[_Away]] = {kind: [] for kind in KINDS}
        self.moved = Moved()

    def offload(self, *kinds: Kind) -> Moved:
        """Take these off the device. Whoever reads them before `onload` reads no memory at all."""
        start = time.perf_counter()
        moved = Moved()
        for kind in KINDS:
            if kind in kinds:
                moved += self._offload(kind)
        moved += Moved(offload_s=time.perf_counter() - start)
        self.moved += moved
        return moved

    def onload(self, *kinds: Kind, keep: bool = True) -> Moved:
        """Bring these back where they are away. Gradients come back as memory, to be zeroed; so does all with keep=False, for a
        load that writes every byte."""
        start = time.perf_counter()
        to_device_bytes = 0
        for kind in kinds:
            for away in self._away[kind]:
                away.storage.resize_(away.num_bytes)
                if keep and away.copy is not None:
                    away.copy.give(away.storage)
                    to_device_bytes += away.num_bytes
            self._away[kind].clear()
        moved = Moved(to_device_bytes=to_device_bytes, onload_s=time.perf_counter() - start)
        self.moved += moved
        return moved

    @contextmanager
    def held(self, *kinds: Kind) -> Iterator[None]:
        """Have these on the device inside the block; those that were away leave again after it."""
        were_away = [kind for kind in kinds if self._away[kind]]
        self.onload(*kinds)
        try:
            yield
        finally:
            self.offload(*were_away)

    def _offload(self, kind: Kind) -> Moved:
        storages = self._storages(kind)
        # Copies of storages that the model no longer has go before new ones are made.
        copies = self._copies[kind] = {
            ref: copy for ref, copy in self._copies[kind].items() if ref in storages and copy.num_bytes == storages[ref].nbytes()
        }
        has_values = kind != "gradients"
        sums = _content_sums(storages.values()) if has_values else [0] * len(storages)
        to_host_bytes = dropped_bytes = 0
        leaving = []
        for (ref, storage), content in zip(storages.items(), sums, strict=True):
            num_bytes = storage.nbytes()
            if has_values and ref not in copies:
                copies[ref] = _HostCopy.of_size(num_bytes, pinned=storage.is_cuda)
            if has_values and copies[ref].content != content:
                copies[ref].take(storage, content)
                to_host_bytes += num_bytes
            else:
                dropped_bytes += num_bytes
            self._away[kind].append(_Away(storage, num_bytes, copies.get(ref)))
            if storage.is_cuda:
                leaving.append(storage)
            else:  # at once, so that never more than one storage is there twice
                storage.resize_(0)
        if leaving:
            torch.cuda.current_stream().synchronize()  # the copies are asynchronous, and a freed block may be given away
            for storage in leaving:
                storage.resize_(0)
            torch.cuda.empty_cache()  # the engine is another process
        return Moved(to_host_bytes, dropped_bytes)

    def _storages(self, kind: Kind) -> dict[StorageWeakRef, torch.UntypedStorage]:
        """The storages of a kind that have bytes on the device now."""
        owners: dict[StorageWeakRef, tuple[Kind, torch.UntypedStorage]] = {}
        for owner in KINDS[: KINDS.index(kind) + 1]:
            for tensor in self._tensors(owner):
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.is_cuda == has_cuda():  # a count of steps may live on the host
                    owners.setdefault(StorageWeakRef(storage), (owner, storage))  # type: ignore[no-untyped-call]
        return {ref: storage for ref, (owner, storage) in owners.items() if owner == kind}


def require_memory(tensors: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Raise RunFailed where a named tensor is off-loaded: to touch it would be to touch no memory, which ends the process."""
    for name, tensor in tensors:
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            raise RunFailed(f"{what}: {name} is off-loaded; bring the parameters back first")


@dataclass(frozen=True)
class _Away:
    storage: torch.UntypedStorage
    num_bytes: int
    copy: _HostCopy | None


@dataclass
class _HostCopy:
    """A storage's bytes on the host. content: their sum, None before the first."""

    pieces: Sequence[Tensor]
    content: int | None = None

    @classmethod
    def of_size(cls, num_bytes: int, pinned: bool) -> _HostCopy:
        return cls([torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in piece_sizes(num_bytes)])

    @property
    def num_bytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)

    def take(self, storage: torch.UntypedStorage, content: int) -> None:
        for piece, part in zip(self.pieces, self._parts(storage), strict=True):
            piece.copy_(part, non_blocking=True)
        self.content = content

    def give(self, storage: torch.UntypedStorage) -> None:
        for piece, part in zip(self.pieces, self._parts(storage), strict=True):
            part.copy_(piece, non_blocking=True)

    def _parts(self, storage: torch.UntypedStorage) -> Sequence[Tensor]:
        return _bytes_of(storage).split_with_sizes([piece.numel() for piece in self.pieces])


def piece_sizes(num_bytes: int) -> list[int]:
    """A host copy's pieces. torch rounds page-locked memory up to a power of two, so one piece could take twice its bytes; these
    take less than 1 MiB more."""
    sizes = []
    size = _LARGEST_PIECE
    while num_bytes:
        while size > max(num_bytes, _SMALLEST_PIECE):
            size //= 2
        sizes.append(min(size, num_bytes))
        num_bytes -= sizes[-1]
    return sizes


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _content_sums(storages: Iterable[torch.UntypedStorage]) -> list[int]:
    """The sum of each storage's bytes; the device is waited for once."""
    sums = [content_sum(_bytes_of(storage)) for storage in storages]
    return torch.stack(sums).tolist() if sums else []


def content_sum(data: Tensor) -> Tensor:
    """0-dim int64, on the device of `data` (uint8): the 32-bit words of the bytes, each times an odd random 64-bit factor of its
    place, modulo 2^64. A change of one word always shows, any other but for a chance of 2^-32 at most."""
    factors = _factors(data.device)
    num_words = data.numel() // 4
    words = data[: num_words * 4].view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, num_words, _BLOCK_WORDS):
        block = words[start : start + _BLOCK_WORDS]
        total = total * factors[0] + (block * factors[: block.numel()]).sum()
    tail = data[num_words * 4 :]
    return total * factors[1] + (tail * factors[: tail.numel()]).sum()


@lru_cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(20_240_229)
    limits = torch.iinfo(torch.int64)
    return (torch.randint(limits.min, limits.max, (_BLOCK_WORDS,), generator=generator) | 1).to(device)
