"""How do named tensors share one contiguous buffer? Views by name into plain memory, or into memory that other processes open.

What lies where is the `Manifest`'s matter.
"""

from __future__ import annotations

import math
import mmap
import os
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megappo.errors import RunFailed, UserError
from megappo.pp_weights.manifest import (
    ALIGNMENT_BYTES,
    Manifest,
    ManifestEntry,
    TensorMeta,
    build_manifest,
    check_alignment,
    dtype_name,
    round_up,
)


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
    check_alignment(alignment_bytes)
    return round_up(math.prod(shape) * dtype.itemsize, alignment_bytes) // dtype.itemsize


@dataclass
class MemoryBuffer:
    """One contiguous run of bytes and the manifest that says what lies where. data: uint8, (total_bytes,)."""

    manifest: Manifest
    data: torch.Tensor

    def views(self) -> dict[str, torch.Tensor]:
        """Every tensor as a view into the bytes, no copy."""
        return views_of(self.data, self.manifest)


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
        if entry is None or entry.held_shape != tuple(shape) or entry.dtype != dtype_name(dtype):
            held = "nothing" if entry is None else f"{entry.dtype} {entry.held_shape}"
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
        return views_of(self.data, self.manifest)

    def close(self) -> None:
        """Let go of the memory (views that are still held keep it mapped). Safe to call twice."""
        self._data = None
        if self._close_fd is not None:
            self._close_fd()


def views_of(data: torch.Tensor, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Every tensor of the manifest as a view into the bytes `data` (uint8), no copy; of a cut one the rows that are there."""
    return {entry.name: _view(data, entry) for entry in manifest.entries}


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
    flat = data[entry.offset : entry.offset + entry.num_bytes]
    return flat.view(getattr(torch, entry.dtype)).view(entry.held_shape)
