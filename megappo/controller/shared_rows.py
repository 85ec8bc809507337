"""How do the ranks on the driver's host get a call's tensors? The driver lays them into memory once, and these ranks map it.

A rank maps its rows privately: a page that it writes to becomes its own (copy on write), unseen by the driver and by other ranks.
The driver lays out a memory anew only when no rank holds a tensor in it; each answer says what its rank still holds. So a tensor
that a worker keeps stays as it is, and costs one memory more. (Not in a child process that a worker forks: nobody knows of it.)
"""

from __future__ import annotations

import logging
import math
import mmap
import weakref
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megappo.controller.host_memory import HostMemory, map_private
from megappo.controller.wire import DTYPES, described
from megappo.controller.worker import Tensors
from megappo.pp_weights.manifest import round_up

logger = logging.getLogger("megappo")

SHARED_FROM_BYTES = 512 * 1024  # less is sent sooner than laid out and mapped, as measured with 4 ranks
MOST_MEMORIES = 4  # where workers keep the tensors of as many calls, the next ones come over their sockets
ALIGNMENT_BYTES = 64

PartKey = tuple[int, ...]
Place = dict[str, Any]
"""Where a part of a call lies, as it travels to a rank: number and path of the memory, offset and bytes of the part, and of each
tensor name, dtype, shape, offset within the part."""


@dataclass(frozen=True)
class Part:
    """What one rank gets of a call: rows of the tensors that it was called with."""

    tensors: Mapping[str, Tensor] | None
    rows: slice | None
    """None: the tensors as they are."""

    @property
    def key(self) -> PartKey:
        """Equal for parts that are the same bytes."""
        return id(self.tensors), *((self.rows.start, self.rows.stop) if self.rows else ())

    def cut(self) -> Tensors | None:
        if self.tensors is None or self.rows is None:
            return None if self.tensors is None else dict(self.tensors)
        return {name: tensor[self.rows] for name, tensor in self.tensors.items()}


class SharedRows:
    """The driver's end: memories that take turns. As much as the largest call needed stays allocated until `close`."""

    def __init__(self) -> None:
        self.near: set[int] = set()
        """The ranks that can map this process's memory, but rank 0, which is this process."""
        self._lent: list[_Lent] = []
        self._next_number = 0
        self._has_warned = False
        self._own = MappedRows()

    def lay(self, part_of: Mapping[int, Part]) -> dict[PartKey, Place]:
        """Lay out, once each, the parts of the near ranks. Nothing where no near rank or little is called, or memory is short."""
        ranks = {rank for rank, part in part_of.items() if rank in self.near and part.tensors is not None}
        if not ranks:
            return {}
        parts = {part.key: part for rank, part in part_of.items() if rank in ranks | {0}}
        places, laid, end = {}, [], 0
        for key, part in parts.items():
            begin = end = round_up(end, mmap.ALLOCATIONGRANULARITY)
            schema = []
            for name, tensor in (part.cut() or {}).items():
                end = round_up(end, ALIGNMENT_BYTES)
                schema.append((*described(name, tensor), end - begin))
                laid.append((end, tensor))
                end += tensor.nbytes
            places[key] = {"offset": begin, "bytes": end - begin, "tensors": schema}
        if sum(tensor.nbytes for _, tensor in laid) < SHARED_FROM_BYTES:
            return {}
        lent = self._free(end)
        if lent is None:
            return {}
        lent.memory.fill(laid)
        lent.holders |= ranks
        return {key: {**place, "memory": lent.number, "path": lent.memory.path} for key, place in places.items()}

    def own_rows(self, part: Part, places: Mapping[PartKey, Place]) -> Tensors | None:
        """Rank 0's part. It is no more the batch's memory than other ranks' is."""
        rows = part.cut()
        if rows is None:
            return None
        return self._own.open(places[part.key]) if places else {name: tensor.clone() for name, tensor in rows.items()}

    def answered(self, rank: int, held: Collection[int]) -> None:
        """A rank has said in which memories it still holds tensors."""
        for lent in self._lent:
            if lent.number in held:
                lent.holders.add(rank)
            else:
                lent.holders.discard(rank)

    def sweep(self) -> None:
        """Unmap what this process's own worker does not use any more."""
        self._own.sweep()

    def close(self) -> None:
        for lent in self._lent:
            lent.memory.close()
        self._lent = []

    def _free(self, num_bytes: int) -> _Lent | None:
        """A memory of this size or more that nobody uses, or None, which is said once."""
        own = self._own.held()
        free = [lent for lent in self._lent if not lent.holders and lent.number not in own]
        fitting = [lent for lent in free if lent.memory.num_bytes >= num_bytes]
        if fitting:
            return min(fitting, key=lambda lent: lent.memory.num_bytes)
        for lent in free:  # too small: a larger one takes their place
            lent.memory.close()
            self._lent.remove(lent)
        reason = f"workers keep the tensors of {len(self._lent)} calls"
        if len(self._lent) < MOST_MEMORIES:
            try:
                lent = _Lent(self._next_number, HostMemory(num_bytes))
            except OSError as error:
                reason = str(error.strerror)
            else:
                self._next_number += 1
                self._lent.append(lent)
                return lent
        if not self._has_warned:
            logger.warning(
                "%.1f MiB of a call's tensors do not go into shared memory: %s; the ranks of this host get them over sockets, "
                "a copy each, which is slower",
                num_bytes / 2**20,
                reason,
            )
        self._has_warned = True
        return None


class MappedRows:
    """A rank's end: the tensors of its calls, and which of them are still in use."""

    def __init__(self) -> None:
        self._mapped: list[_Mapping] = []

    def open(self, place: Place) -> Tensors:
        """The tensors that lie there, as this process's own: they may be written to, and be kept."""
        found = {}
        view = self._map(place) if place["bytes"] else None  # each tensor keeps it alive; it is gone once none is in use
        for name, dtype_name, shape, offset in place["tensors"]:
            dtype, count = DTYPES[dtype_name], math.prod(shape)
            flat = torch.frombuffer(view, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)
            found[name] = flat.view(shape)
        return found

    def without(self, tensors: Tensors | None) -> Tensors | None:
        """The same tensors, those in mapped memory as copies: so an answer that returns what was given holds nothing back."""
        if tensors is None or not self._mapped:
            return tensors
        return {name: tensor.clone() if self._holds(tensor) else tensor for name, tensor in tensors.items()}

    def held(self) -> list[int]:
        """Numbers of the memories in which a tensor is in use."""
        return sorted({mapping.number for mapping in self._mapped if mapping.view() is not None})

    def sweep(self) -> None:
        """Unmap what is not in use. It takes milliseconds, so it is no part of an answer."""
        for mapping in self._mapped:
            if mapping.view() is None:
                mapping.memory.close()
        self._mapped = [mapping for mapping in self._mapped if not mapping.memory.closed]

    def _holds(self, tensor: Tensor) -> bool:
        start = tensor.untyped_storage().data_ptr()  # that of the tensor is 0 where it is empty
        return any(start in mapping.addresses for mapping in self._mapped)

    def _map(self, place: Place) -> memoryview:
        memory = map_private(place["path"], place["offset"], place["bytes"])
        view = memoryview(memory)
        start = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        self._mapped.append(_Mapping(place["memory"], memory, range(start, start + len(memory)), weakref.ref(view)))
        return view


@dataclass
class _Lent:
    """A memory of the driver, and the ranks that hold tensors in it."""

    number: int
    memory: HostMemory
    holders: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Mapping:
    """A part of a call in this process. number: of the memory. view: dead once no tensor is in use."""

    number: int
    memory: mmap.mmap
    addresses: range
    view: weakref.ref[memoryview]
