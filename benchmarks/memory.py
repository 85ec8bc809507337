"""How much memory does a piece of code take at its peak? As torch sees its storages and as the kernel counts pages."""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UNSEEN_BYTES = 3 << 20  # names, offsets, Python's objects; and the kernel's record is off by some hundred kB
_LIBC = ctypes.CDLL(None)
_M_MMAP_THRESHOLD = -3


class LiveStorages(TorchDispatchMode):
    """Sees what every operation returns. peak: the most bytes in live storages of a page and more that are not `known`."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage.nbytes() >= mmap.PAGESIZE and storage.data_ptr() not in self._known:
                    self._live[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {place: held for place, held in self._live.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def free_at_once() -> None:
    """From now on large blocks go back to the system as soon as they are free; else the allocator keeps some for later."""
    _LIBC.mallopt(_M_MMAP_THRESHOLD, 128 << 10)


def peak(run: Callable[[], object], known: Iterable[torch.Tensor]) -> int:
    """The most bytes in storages that are not `known` while `run` runs, after `free_at_once` and a run before.

    The kernel's record of the process's peak must agree: what numpy, numba or a kernel takes for itself would stand there."""
    gc.collect()
    _LIBC.malloc_trim(0)
    before = _kernel_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's record of the peak starts anew
    with LiveStorages(known) as storages:
        run()
    grown = _kernel_bytes("VmHWM") - before
    assert abs(grown - storages.peak) < UNSEEN_BYTES, f"storages: {storages.peak} bytes; the kernel saw {grown}"
    return storages.peak


def _kernel_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")
