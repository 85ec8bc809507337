"""What does a hand-over cost on four ranks, tp2 x pp2 x vpp2? Ours beside the peers' real code and beside memcpy, in one run.

    python -m benchmarks.weights_handover small|large|pp|counts FILE

One world of four forked ranks; `benchmarks.weights` starts it under the peers' Python. FILE takes what was found as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import weights_model
from benchmarks.counting import Counts, counted, most
from benchmarks.peers import optional, versions
from benchmarks.timing import contest
from benchmarks.weights_model import LARGE, SMALL, assert_complete, build_stamped, four_ranks, num_bytes, same_bits, stamped
from megappo.controller.launch import join_world, launch_local
from megappo.models.shape import ModelShape
from megappo.parallel_state.device import import_megatron, start_world
from megappo.parallel_state.groups import RoleGroups
from megappo.pp_weights.manager import WeightManager
from megappo.pp_weights.mapping import chunk_pieces, expected_hf_tensors

WORLD_SIZE = 4
PEERS = {"small": ("verl", "slime"), "large": ("verl", "slime"), "pp": ("verl01",), "counts": ("verl",)}
ROUNDS = {"small": 15, "large": 9, "pp": 25}
BUCKET_BYTES = 8 << 20  # where buckets are counted
loaded: dict[str, ModuleType] = {}  # the peers that are there; filled before the ranks are forked


def load_peers(part: str) -> None:
    import_megatron()
    for name in PEERS[part]:
        adapter = importlib.import_module(f"benchmarks.peers.{name}")
        optional(adapter, adapter.load)
        if name in versions:
            loaded[name] = adapter


def full(part: str) -> dict[str, Any]:
    """Complete HF tensors, readable by a receiver of this host."""
    shape = SMALL if part == "small" else LARGE
    groups = four_ranks(shape)
    with groups.active():
        chunks = build_stamped(shape, groups)
        manager = WeightManager(chunks, shape, groups, is_active=lambda: True)
        buffer = manager.publish(1)
        if buffer is not None:
            assert_complete(buffer.views().items(), shape, "ours")
        rivals: dict[str, Callable[[], object] | None] = dict.fromkeys(PEERS[part]) | {"memcpy": memcpy(num_bytes(shape))}
        for name, adapter in loaded.items():
            tensors = adapter.hand_over(chunks, shape, groups)
            assert_complete(tensors(), shape, name)  # on every rank
            rivals[name] = lambda tensors=tensors: _take(tensors())
        seconds = _pairs(lambda: manager.publish(2), rivals, ROUNDS[part])
        manager.close()
    return {"bytes": num_bytes(shape), "tensors": len(expected_hf_tensors(shape)), "seconds": seconds}


def pp() -> dict[str, Any]:
    """All stages' shards side by side, tp shards as they are."""
    shape = SMALL
    groups = four_ranks(shape)
    with groups.active():
        chunks = build_stamped(shape, groups)
        manager = WeightManager(chunks, shape, groups, is_active=lambda: True, gather="pp")
        buffer = manager.publish(1)
        if buffer is not None:
            _assert_shards(buffer.views(), shape, groups)
        rivals: dict[str, Callable[[], object] | None] = dict.fromkeys(PEERS["pp"])
        if "verl01" in loaded:
            own, gather, everyone = loaded["verl01"].gather_stages(shape, groups)
            weights_model.stamp(own, shape, groups.layout, groups.rank)
            gather()
            _assert_stages(everyone(), shape, groups)
            rivals["verl01"] = gather
        seconds = _pairs(lambda: manager.publish(2), rivals, ROUNDS["pp"])
        manager.close()
    return {"bytes": num_bytes(shape), "seconds": seconds}


def counts() -> dict[str, Any]:
    """Collectives and bytes of a steady sync: each transport, gather and mode."""
    shape = SMALL
    groups = four_ranks(shape)
    found: dict[str, Any] = {}
    with groups.active():
        chunks = build_stamped(shape, groups)
        for transport, gather, mode in product(("shared_memory", "collective"), ("full", "pp"), ("full", "bucketed")):
            manager = WeightManager(
                chunks,
                shape,
                groups,
                is_active=lambda: True,
                transport=transport,
                gather=gather,
                mode=mode,
                bucket_bytes=BUCKET_BYTES,
            )
            manager.publish(1)
            with counted() as own:
                manager.publish(2)
            case = _of_all_ranks(own)
            # Over shared memory nobody receives: the owners write, each byte of the model once.
            shared = transport == "shared_memory"
            case["counted_bytes"] = _sum(manager.stats.copied_bytes) if shared else case["received_bytes"]
            case["formula_bytes"] = manager.plan.model_bytes if shared else manager.plan.formula_bytes
            case["stage_buckets"] = groups.layout.pp * manager.plan.num_buckets
            found[f"{transport} {gather} {mode}"] = case
            manager.close()
        if "verl" in loaded:  # that the counter sees object collectives
            tensors = loaded["verl"].hand_over(chunks, shape, groups)
            with counted() as own:
                _take(tensors())
            found["verl"] = _of_all_ranks(own)
    return found


def _sum(value: float) -> float:
    box = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(box)
    return float(box)


def _pairs(
    ours: Callable[[], object], rivals: dict[str, Callable[[], object] | None], rounds: int
) -> dict[str, dict[str, float]]:
    """Ours against each rival by itself: what a third one leaves behind in caches and allocator would meet one side alone.

    Where a rival is absent (None), ours alone."""
    return {name: contest({"ours": ours} | ({"peer": rival} if rival else {}), rounds) for name, rival in rivals.items()}


def memcpy(total_bytes: int) -> Callable[[], object]:
    """This rank's share of the bytes, from warm memory to warm memory, in one piece. libc's: faster than torch's copy."""
    share = total_bytes // dist.get_world_size()
    source, destination = torch.full((share,), 1, dtype=torch.uint8), torch.full((share,), 2, dtype=torch.uint8)
    return lambda: np.copyto(destination.numpy(), source.numpy())


def _of_all_ranks(own: Counts) -> dict[str, float]:
    return {name: most(value) for name, value in vars(own).items()}


def _take(tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    for _ in tensors:
        pass


def _assert_shards(views: dict[str, torch.Tensor], shape: ModelShape, groups: RoleGroups) -> None:
    """Ours with `gather: pp`: under HF's names this tp rank's shard of every tensor."""
    layout, expected = groups.layout, set(expected_hf_tensors(shape))
    for stage in range(layout.pp):
        for chunk in range(layout.vpp):
            for piece in chunk_pieces(shape, layout, groups.coordinates.tp, stage, chunk):
                shard = stamped(piece.hf_name, piece.hf_shape).narrow(piece.dim, piece.start, piece.stop - piece.start)
                assert same_bits(views[piece.hf_name], shard), f"ours: the shard of {piece.hf_name} is wrong"
                expected.remove(piece.hf_name)
    assert not expected and set(views) == set(expected_hf_tensors(shape))


def _assert_stages(params: Any, shape: ModelShape, groups: RoleGroups) -> None:
    """verl 0.1: every stage's parameters under Megatron's names."""
    layout = groups.layout
    for stage in range(layout.pp):
        for chunk in range(layout.vpp):
            held = params[stage][chunk]
            for piece in chunk_pieces(shape, layout, groups.coordinates.tp, stage, chunk):
                shard = piece.hf(stamped(piece.hf_name, piece.hf_shape))
                assert same_bits(piece.local(held[piece.param].detach()), shard), f"verl01: {piece.param} is wrong"


def rank_main(part: str, file: Path) -> int:
    rank, world_size, store = join_world(os.environ)
    start_world(store, rank, world_size)
    found = {"pp": pp, "counts": counts}[part]() if part in ("pp", "counts") else full(part)
    if rank == 0:
        found["peers"] = versions
        file.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def main(part: str, file: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        return launch_local(WORLD_SIZE, lambda: rank_main(part, file), folder, preload=lambda: load_peers(part))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], Path(sys.argv[2])))
