"""How much memory does a bucketed hand-over take beside the model? The most that any of four ranks has mapped for weights.

    python -m benchmarks.weights_memory FILE

Counted are the bytes of all live storages of torch beside the model's own, those in memory shared with other ranks too; the
kernel's record of the rank's peak must agree. The bound: two buckets and the largest tensor.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.counting import most
from benchmarks.memory import LiveStorages, free_at_once, peak
from benchmarks.weights_model import DTYPE, LARGE, SMALL, build_stamped, expected_hf_tensors, four_ranks, same_bits, stamped
from megappo.controller.launch import join_world, launch_local
from megappo.models.shape import ModelShape
from megappo.parallel_state.device import import_megatron, start_world
from megappo.parallel_state.groups import RoleGroups
from megappo.pp_weights.manager import WeightManager

WORLD_SIZE = 4
CASES: dict[str, tuple[ModelShape, int]] = {"small": (SMALL, 4 << 20), "large": (LARGE, 32 << 20)}


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
    extra = peak(lambda: hand_over(transport, shape, bucket_bytes, chunks, groups, check=False), own)
    largest = max(_bytes_of(size) for size in expected_hf_tensors(shape).values())
    return {"extra_bytes": most(extra), "bound_bytes": 2 * bucket_bytes + largest}


def _bytes_of(size: tuple[int, ...]) -> int:
    return torch.Size(size).numel() * DTYPE.itemsize


def rank_main(file: Path) -> int:
    rank, world_size, store = join_world(os.environ)
    start_world(store, rank, world_size)
    free_at_once()
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
