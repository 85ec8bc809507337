"""Where does each named tensor lie in one contiguous buffer? Layout, manifest, and the buffer another process can open.

Format: tensors in natural name order (layers.2 before layers.10), each at a multiple of `alignment_bytes`, row-major bytes, zeros
between them. Offsets are in bytes, so any mix of dtypes (int8, float8, bool, ...) shares one buffer. The `Manifest` travels with
the bytes: a receiver derives nothing.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import mmap
import os
import re
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch

from megappo.errors import RunFailed, UserError

ALIGNMENT_BYTES = 16  # 128 bits
MANIFEST_FORMAT = 1


class TensorMeta(NamedTuple):
    """Shape and dtype of one tensor; a plain (shape, dtype) pair serves as well."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ManifestEntry:
    """One tensor in the buffer. dtype: torch's name without the prefix. checksum: `verify.checksum` of the bytes, or None."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    checksum: int | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"manifest entry {self.name!r} has the unknown dtype {self.dtype!r}")
        return dtype


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
            size = math.prod(entry.shape) * entry.torch_dtype.itemsize
            if entry.num_bytes != size:
                raise ValueError(f"manifest entry {entry.name!r} says {entry.num_bytes} bytes; shape and dtype need {size}")
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
        entries = tuple(ManifestEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in fields.pop("entries"))
        return cls(entries=entries, **fields)


def weight_buffer_meta(source: torch.nn.Module | Mapping[str, torch.Tensor]) -> dict[str, TensorMeta]:
    """Name -> (shape, dtype) of a module's parameters and persistent buffers, or of named tensors. Tied parameters come once,
    under their first name."""
    if isinstance(source, torch.nn.Module):
        named = {n: t for n, t in source.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    else:
        named = dict(source)
    seen: set[int] = set()
    meta = {}
    for name, tensor in named.items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            meta[name] = TensorMeta(tuple(tensor.shape), tensor.dtype)
    return meta


def calc_padded_numel(shape: tuple[int, ...], dtype: torch.dtype, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Elements that a tensor takes once padded to the alignment: (9,) bfloat16 at 16 bytes takes 16."""
    _check_alignment(alignment_bytes)
    return _round_up(math.prod(shape) * dtype.itemsize, alignment_bytes) // dtype.itemsize


def natural_order(name: str) -> list[str | int]:
    """Sort key that puts layers.2 before layers.10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


def build_manifest(meta: Mapping[str, TensorMeta], alignment_bytes: int = ALIGNMENT_BYTES, weight_version: int = 0) -> Manifest:
    """The layout of a buffer for `meta`, without checksums. The fingerprint covers names, shapes and dtypes."""
    _check_alignment(alignment_bytes)
    entries = []
    offset = 0
    for name in sorted(meta, key=natural_order):
        shape, dtype = meta[name]
        num_bytes = math.prod(shape) * dtype.itemsize
        entries.append(ManifestEntry(name, str(dtype).removeprefix("torch."), tuple(shape), offset, num_bytes))
        offset += _round_up(num_bytes, alignment_bytes)
    table = json.dumps([(e.name, e.dtype, e.shape) for e in entries])
    fingerprint = hashlib.blake2b(table.encode(), digest_size=16).hexdigest()
    return Manifest(tuple(entries), offset, weight_version, fingerprint, alignment_bytes)


@dataclass
class MemoryBuffer:
    """One contiguous run of bytes and the manifest that says what lies where. data: uint8, (total_bytes,)."""

    manifest: Manifest
    data: torch.Tensor

    def views(self) -> dict[str, torch.Tensor]:
        """Every tensor as a view into the bytes, no copy."""
        return {entry.name: _view(self.data, entry) for entry in self.manifest.entries}


def build_memory_buffer(
    meta: Mapping[str, TensorMeta], device: str | torch.device = "cpu", alignment_bytes: int = ALIGNMENT_BYTES
) -> MemoryBuffer:
    """Allocate one zeroed buffer for every tensor of `meta`. device: "cpu", "pinned" (page-locked host memory), or torch's.
    Memory that another process can open is `WeightBuffer.create`."""
    manifest = build_manifest(meta, alignment_bytes)
    pinned = device == "pinned"
    raw = torch.zeros(
        manifest.total_bytes + alignment_bytes, dtype=torch.uint8, device="cpu" if pinned else device, pin_memory=pinned
    )
    skip = -raw.data_ptr() % alignment_bytes  # allocators align to 64 bytes at most; larger alignments hold for the address too
    return MemoryBuffer(manifest, raw[skip : skip + manifest.total_bytes])


def build_memory_reference(meta: Mapping[str, TensorMeta], memory_buffer: MemoryBuffer) -> dict[str, torch.Tensor]:
    """Views into `memory_buffer` for every name of `meta`. Raises ValueError where the buffer holds something else."""
    entries = {entry.name: entry for entry in memory_buffer.manifest.entries}
    views = {}
    for name, (shape, dtype) in meta.items():
        entry = entries.get(name)
        if entry is None or entry.shape != tuple(shape) or entry.torch_dtype != dtype:
            held = "nothing" if entry is None else f"{entry.dtype} {entry.shape}"
            raise ValueError(f"the buffer holds {held} under {name!r}, not {dtype} {tuple(shape)}")
        views[name] = _view(memory_buffer.data, entry)
    return views


class WeightBuffer:
    """A buffer in shared memory without a name: a memfd that processes of this host open through `path`.

    The memory lives until the creator has closed it and every view, in every process, is gone. Killed processes leave nothing.
    """

    def __init__(self, path: str, manifest: Manifest, data: torch.Tensor, fd: int | None = None) -> None:
        self.path = path
        self.manifest = manifest
        self._data: torch.Tensor | None = data
        self._close_fd = weakref.finalize(self, os.close, fd) if fd is not None else None

    @classmethod
    def create(cls, manifest: Manifest) -> WeightBuffer:
        """Allocate the memory now, so that lack of it shows here and not as a killed rank in mid-write."""
        size = max(manifest.total_bytes, 1)
        free = available_memory_bytes()
        if free is not None and size > free:
            raise UserError(
                f"the weight buffer needs {size / 2**20:.0f} MiB of shared memory, {free / 2**20:.0f} MiB are free; "
                "use a smaller model or dtype, or give the job more memory"
            )
        fd = os.memfd_create("megappo_weights", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, size)
            data = _map(fd, manifest.total_bytes, writable=True)
        except BaseException:
            os.close(fd)
            raise
        return cls(f"/proc/{os.getpid()}/fd/{fd}", manifest, data, fd)

    @classmethod
    def open(cls, path: str, manifest: Manifest, writable: bool = False) -> WeightBuffer:
        """Map another process's buffer. Read-only unless `writable` (the ranks that fill it)."""
        try:
            fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise RunFailed(
                f"cannot open the weight buffer {path} ({error.strerror}); it must be on this host, its creator alive"
            ) from error
        try:
            size = os.fstat(fd).st_size
            if size < manifest.total_bytes:
                raise RunFailed(f"the weight buffer {path} has {size} bytes; its manifest says {manifest.total_bytes}")
            return cls(path, manifest, _map(fd, manifest.total_bytes, writable))
        finally:
            os.close(fd)

    @property
    def data(self) -> torch.Tensor:
        """All bytes, uint8."""
        if self._data is None:
            raise RunFailed("the weight buffer is closed")
        return self._data

    def views(self) -> dict[str, torch.Tensor]:
        """Every tensor as a view into the shared memory, no copy."""
        data = self.data
        return {entry.name: _view(data, entry) for entry in self.manifest.entries}

    def close(self) -> None:
        """Let go of the memory (views that are still held keep it mapped). Safe to call twice."""
        self._data = None
        if self._close_fd is not None:
            self._close_fd()


def available_memory_bytes() -> int | None:
    """Bytes this process can still allocate: the host's, or less where a cgroup limits it. None where the system does not say."""
    limits = []
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        with (
            open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit,
            open("/sys/fs/cgroup/memory.current", encoding="ascii") as used,
        ):
            text = limit.read().strip()
            if text != "max":
                limits.append(int(text) - int(used.read()))
    except OSError:  # no /proc, or no cgroup v2: what was read so far counts
        pass
    return min(limits) if limits else None


def _map(fd: int, num_bytes: int, writable: bool) -> torch.Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    # MAP_POPULATE fills the page table now, so that the first hand-over is as fast as the next
    memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=protection)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)


def _view(data: torch.Tensor, entry: ManifestEntry) -> torch.Tensor:
    return data[entry.offset : entry.offset + entry.num_bytes].view(entry.torch_dtype).view(entry.shape)


def _round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple


def _check_alignment(alignment_bytes: int) -> None:
    if alignment_bytes < ALIGNMENT_BYTES or alignment_bytes % ALIGNMENT_BYTES:
        raise UserError(f"pp_weights.alignment_bytes={alignment_bytes} must be a multiple of 16 (128 bits), e.g. 16, 256 or 512")
