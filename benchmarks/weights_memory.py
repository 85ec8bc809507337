"""How much memory does a bucketed hand-over take beside the model? The most that any of four ranks has mapped for weights.

    python -m benchmarks.weights_memory FILE

Counted are the bytes of all live storages of torch beside the model's own, those in memory shared with other ranks too; the
kernel's record of the rank's peak must agree. The bound: two buckets and the largest tensor.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.counting import most
from benchmarks.weights_model import DTYPE, LARGE, SMALL, build_stamped, expected_hf_tensors, four_ranks, same_bits, stamped
from megappo.controller.launch import join_world, launch_local
from megappo.models.shape import ModelShape
from megappo.parallel_state.device import import_megatron, start_world
from megappo.parallel_state.groups import RoleGroups
from megappo.pp_weights.manager import WeightManager

WORLD_SIZE = 4
UNSEEN_BYTES = 3 << 20  # names, offsets, Python's objects; and the kernel's record is off by some hundred kB
_LIBC = ctypes.CDLL(None)
_M_MMAP_THRESHOLD = -3
CASES: dict[str, tuple[ModelShape, int]] = {"small": (SMALL, 4 << 20), "large": (LARGE, 32 << 20)}


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


def receive(manager: WeightManager, version: int, check: bool) -> None:
    """Look at every page of every tensor and keep none."""
    for name, tensor in manager.iterate(version):
        if tensor is not None:
            tensor.view(torch.int16).numpy().reshape(-1)[::1024].sum()
            assert not check or same_bits(tensor, stamped(name, tuple(tensor.shape))), f"{name} is wrong"


def hand_over(transport: Any, shape: ModelShape, bucket_bytes: int, chunks: Any, groups: RoleGroups, check: bool) -> None:
    manager = WeightManager(
        chunks, shape, groups, is_active=lambda: True, transport=transport, mode="bucketed", bucket_bytes=bucket_bytes
    )
    assert manager.plan.num_buckets > 2
    for version in (1, 2):
        receive(manager, version, check)
    manager.close()


def measure(transport: Any, shape: ModelShape, bucket_bytes: int, chunks: Any, groups: RoleGroups) -> dict[str, float]:
    own = [tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())]
    with LiveStorages(own):  # and whatever is allocated once
        hand_over(transport, shape, bucket_bytes, chunks, groups, check=True)
    gc.collect()
    _LIBC.malloc_trim(0)
    before = _kernel_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the kernel's record of the peak starts anew
    with LiveStorages(own) as storages:
        hand_over(transport, shape, bucket_bytes, chunks, groups, check=False)
    grown = _kernel_bytes("VmHWM") - before
    assert abs(grown - storages.peak) < UNSEEN_BYTES, f"storages: {storages.peak} bytes; the kernel saw {grown}"
    largest = max(_bytes_of(size) for size in expected_hf_tensors(shape).values())
    return {"extra_bytes": most(storages.peak), "bound_bytes": 2 * bucket_bytes + largest}


def _bytes_of(size: tuple[int, ...]) -> int:
    return torch.Size(size).numel() * DTYPE.itemsize


def _kernel_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def rank_main(file: Path) -> int:
    rank, world_size, store = join_world(os.environ)
    start_world(store, rank, world_size)
    # Large blocks go back to the system as soon as they are free; else the allocator keeps some for later.
    _LIBC.mallopt(_M_MMAP_THRESHOLD, 128 << 10)
    found = {}
    for case, (shape, bucket_bytes) in CASES.items():
        groups = four_ranks(shape)
        with groups.active():
            chunks = build_stamped(shape, groups)
            for transport in ("shared_memory", "collective"):
                found[f"{case} {transport}"] = measure(transport, shape, bucket_bytes, chunks, groups)
    if rank == 0:
        file.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        raise SystemExit(launch_local(WORLD_SIZE, lambda: rank_main(Path(sys.argv[1])), folder, preload=import_megatron))
