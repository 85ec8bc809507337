"""What lies where in one contiguous buffer? `Manifest`: it travels with the bytes, and a receiver derives nothing. No torch.

Format: tensors one after the other, each at a multiple of `alignment_bytes`, row-major bytes, zeros between them. Offsets are in
bytes, so any mix of dtypes (int8, float8, bool, ...) shares one buffer.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from megappo.errors import UserError

if TYPE_CHECKING:
    import torch

ALIGNMENT_BYTES = 16  # 128 bits
MANIFEST_FORMAT = 2

ITEM_BYTES = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"), 1
    ),
}
"""Bytes of one element, by torch's name of the dtype without `torch.`."""


class TensorMeta(NamedTuple):
    """Shape and dtype (torch's, or its name) of one tensor; a plain (shape, dtype) pair serves as well."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str


@dataclass(frozen=True)
class ManifestEntry:
    """One tensor in the buffer, or some of its rows.

    dtype: torch's name without the prefix. shape: of the whole tensor. rows: (first, end) along dimension 0 where only these rows
    are here; None: all of it is. checksum: `verify.checksum` of the bytes that are here, or None."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    checksum: int | None = None
    rows: tuple[int, int] | None = None

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Shape of what is here."""
        return self.shape if self.rows is None else (self.rows[1] - self.rows[0], *self.shape[1:])


@dataclass(frozen=True)
class Manifest:
    """What a buffer holds, and where. Raises ValueError where entries overlap, leave the buffer or contradict themselves."""

    entries: tuple[ManifestEntry, ...]
    total_bytes: int
    weight_version: int = 0
    fingerprint: str = ""
    alignment_bytes: int = ALIGNMENT_BYTES

    def __post_init__(self) -> None:
        names = set()
        end, previous = 0, "the start"
        for entry in sorted(self.entries, key=lambda e: (e.offset, e.num_bytes)):
            _check_entry(entry)
            if entry.name in names:
                raise ValueError(f"manifest names {entry.name!r} twice")
            if entry.offset % self.alignment_bytes:
                raise ValueError(f"manifest entry {entry.name!r} at {entry.offset} is not a multiple of {self.alignment_bytes}")
            if entry.offset < end:
                raise ValueError(f"manifest entry {entry.name!r} at {entry.offset} overlaps {previous}, which ends at {end}")
            names.add(entry.name)
            end, previous = entry.offset + entry.num_bytes, repr(entry.name)
        if end > self.total_bytes:
            raise ValueError(f"manifest entry {previous} ends at {end}, past the buffer's {self.total_bytes} bytes")

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.entries]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {entry.name: entry.shape for entry in self.entries}

    @property
    def table(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, full shape)."""
        return {entry.name: (entry.dtype, entry.shape) for entry in self.entries}

    def stamped(self, weight_version: int, checksums: Mapping[str, int] | None = None) -> Manifest:
        """The same layout for another version; checksums of an earlier version are dropped."""
        sums = checksums or {}
        stamped = copy.copy(self)  # not `replace`: the layout is as before, so it is not checked again at each hand-over
        if sums or any(entry.checksum is not None for entry in self.entries):
            entries = tuple(replace(entry, checksum=sums.get(entry.name)) for entry in self.entries)
            object.__setattr__(stamped, "entries", entries)
        object.__setattr__(stamped, "weight_version", weight_version)
        return stamped

    def to_json(self) -> str:
        return json.dumps({"format": MANIFEST_FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        fields = json.loads(text)
        found = fields.pop("format", None)
        if found != MANIFEST_FORMAT:
            raise ValueError(f"manifest has format {found!r}; this version reads {MANIFEST_FORMAT}")
        entries = tuple(
            ManifestEntry(**{**entry, "shape": tuple(entry["shape"]), "rows": entry["rows"] and tuple(entry["rows"])})
            for entry in fields.pop("entries")
        )
        return cls(entries=entries, **fields)


def build_manifest(
    meta: Mapping[str, TensorMeta],
    alignment_bytes: int = ALIGNMENT_BYTES,
    weight_version: int = 0,
    *,
    order: Iterable[str] | None = None,
    rows: Mapping[str, tuple[int, int]] | None = None,
) -> Manifest:
    """The layout of a buffer for `meta`, without checksums. The fingerprint covers names, dtypes and shapes.

    order: of the tensors; default: natural order of their names. rows: of the tensors that are held in part."""
    check_alignment(alignment_bytes)
    entries = []
    offset = 0
    for name in sorted(meta, key=natural_order) if order is None else order:
        shape, dtype = tuple(meta[name][0]), dtype_name(meta[name][1])
        entry = ManifestEntry(name, dtype, shape, offset, 0, rows=(rows or {}).get(name))
        num_bytes = math.prod(entry.held_shape) * item_bytes(dtype)
        entries.append(replace(entry, num_bytes=num_bytes))
        offset += round_up(num_bytes, alignment_bytes)
    table = {entry.name: (entry.dtype, entry.shape) for entry in entries}
    return Manifest(tuple(entries), offset, weight_version, fingerprint_of(table), alignment_bytes)


def fingerprint_of(table: Mapping[str, tuple[str, tuple[int, ...]]]) -> str:
    """Of a model's names, dtypes and shapes, whatever their order: 16-byte BLAKE2b of their JSON, in hex."""
    rows = [(name, dtype, shape) for name, (dtype, shape) in sorted(table.items())]
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()


def natural_order(name: str) -> list[str | int]:
    """Sort key that puts layers.2 before layers.10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


def dtype_name(dtype: torch.dtype | str) -> str:
    """torch's name of a dtype, without the prefix."""
    return str(dtype).removeprefix("torch.")


def item_bytes(dtype: str) -> int:
    """Bytes of one element. Raises ValueError for a name that torch does not have."""
    try:
        return ITEM_BYTES[dtype]
    except KeyError:
        raise ValueError(f"unknown dtype {dtype!r}; it is one of {', '.join(ITEM_BYTES)}") from None


def round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


def check_alignment(alignment_bytes: int) -> None:
    if alignment_bytes < ALIGNMENT_BYTES or alignment_bytes % ALIGNMENT_BYTES:
        raise UserError(f"pp_weights.alignment_bytes={alignment_bytes} must be a multiple of 16 (128 bits), e.g. 16, 256 or 512")


def _check_entry(entry: ManifestEntry) -> None:
    if entry.dtype not in ITEM_BYTES:
        raise ValueError(f"manifest entry {entry.name!r} has the unknown dtype {entry.dtype!r}")
    if entry.rows is not None and not (entry.shape and 0 <= entry.rows[0] <= entry.rows[1] <= entry.shape[0]):
        raise ValueError(f"manifest entry {entry.name!r} of shape {entry.shape} has no rows {entry.rows}")
    size = math.prod(entry.held_shape) * ITEM_BYTES[entry.dtype]
    if entry.num_bytes != size:
        raise ValueError(f"manifest entry {entry.name!r} says {entry.num_bytes} bytes; shape and dtype need {size}")
