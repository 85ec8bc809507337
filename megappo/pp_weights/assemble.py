"""How do complete tensors come out of buckets, and did all come? `Assembler`; `deliver` for one buffer with a whole model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from megappo.errors import RunFailed
from megappo.pp_weights.buffer import WeightBuffer
from megappo.pp_weights.manifest import Manifest, ManifestEntry, fingerprint_of, item_bytes
from megappo.pp_weights.update import Bucket, Receiver, Update
from megappo.pp_weights.verify import NamesDiffer, verify


class Assembler:
    """Takes the buckets of one update in order and gives complete tensors. Raises RunFailed for whatever was not announced, comes
    twice, or comes out of order; `finish` for what did not come.

    A tensor that lies whole in a bucket is a view into it. One that comes in parts is put together in other memory. keep: it has
    that memory to itself; else one room, as large as the largest tensor, serves all, and a tensor holds until the next is asked
    for.
    """

    def __init__(self, update: Update, keep: bool = True) -> None:
        self._update, self._keep = update, keep
        self._shared: torch.Tensor | None = None
        self._arrived: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._open: ManifestEntry | None = None  # the part that came last of a tensor that is not complete
        self._room: torch.Tensor | None = None

    def tensors(self, manifest: Manifest, views: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, complete tensor) of one bucket, after its checksums where the update is to be verified."""
        what = f"weights version {self._update.version}"
        if manifest.weight_version != self._update.version:
            raise RunFailed(f"{what}: a bucket of version {manifest.weight_version} came")
        if self._update.verify:
            verify(manifest, views)
        for entry in manifest.entries:
            self._check(entry, what)
            view = views[entry.name]
            if entry.rows is None:
                yield entry.name, view
            else:
                complete = self._put_together(entry, view)
                if complete is None:
                    continue
                yield entry.name, complete
            self._arrived[entry.name] = (entry.dtype, entry.shape)

    def finish(self) -> None:
        what = f"weights version {self._update.version}"
        if self._open is not None:
            assert self._open.rows is not None
            raise RunFailed(f"{what}: of {self._open.name} only {self._open.rows[1]} of {self._open.shape[0]} rows came")
        missing = [name for name in self._update.table if name not in self._arrived]
        if missing:
            raise NamesDiffer(what, missing, [], [])
        if self._update.shards == 1 and fingerprint_of(self._arrived) != self._update.fingerprint:
            raise RunFailed(f"{what}: what came is not the model that was announced (fingerprints differ)")

    def _check(self, entry: ManifestEntry, what: str) -> None:
        announced = self._update.table.get(entry.name)
        if announced is None:
            raise NamesDiffer(what, [], [entry.name], [])
        dtype, shape = announced
        if entry.dtype != dtype or (self._update.shards == 1 and entry.shape != shape):
            raise NamesDiffer(what, [], [], [f"{entry.name} {entry.dtype} {entry.shape}, announced {dtype} {shape}"])
        if entry.name in self._arrived:
            raise RunFailed(f"{what}: {entry.name} came twice")
        if self._open is not None and self._open.name != entry.name:
            raise RunFailed(f"{what}: {entry.name} came before the rest of {self._open.name}")

    def _put_together(self, entry: ManifestEntry, part: torch.Tensor) -> torch.Tensor | None:
        """The complete tensor once its last part is there."""
        assert entry.rows is not None
        first, end = entry.rows
        expected = self._open.rows[1] if self._open is not None and self._open.rows is not None else 0
        if first != expected:
            raise RunFailed(f"{entry.name}: rows {first} to {end} came, expected row {expected}")
        if self._room is None:
            self._room = self._new_room(entry, part)
        self._room[first:end].copy_(part)
        self._open = entry
        if end < entry.shape[0]:
            return None
        complete, self._room, self._open = self._room, None, None
        return complete

    def _new_room(self, entry: ManifestEntry, part: torch.Tensor) -> torch.Tensor:
        if self._keep:
            return torch.empty(entry.shape, dtype=part.dtype, device=part.device)
        if self._shared is None:
            largest = max(math.prod(shape) * item_bytes(dtype) for dtype, shape in self._update.table.values())
            self._shared = torch.empty(largest, dtype=torch.uint8, device=part.device)
        return self._shared[: math.prod(entry.shape) * part.element_size()].view(part.dtype).view(entry.shape)


def deliver(receiver: Receiver, buffer: WeightBuffer, verify: bool = False) -> None:
    """Hand a buffer that holds a complete model to a receiver. verify: the buffer's manifest carries checksums to compare."""
    manifest = buffer.manifest
    receiver.start(Update(manifest.weight_version, manifest.table, manifest.fingerprint, 1, verify=verify))
    receiver.settle()
    receiver.load(Bucket(0, (buffer.path,), (manifest,)))
    receiver.finish()
