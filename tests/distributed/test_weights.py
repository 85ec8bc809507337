"""Do several ranks hand over exactly the model, through both transports, with few collectives and no more bytes than needed?"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megappo.errors import RunFailed, UserError
from megappo.models.shape import ModelShape
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights import manager as manager_module
from megappo.pp_weights.buffer import Manifest, WeightBuffer
from megappo.pp_weights.manager import WeightManager
from megappo.pp_weights.transport import all_gather_pp_params
from megappo.pp_weights.verify import verify
from tests.fake_chunks import make_shape, rank_chunks, stamped_hf
from tests.pool import Pool

pytestmark = pytest.mark.distributed

SHAPE = make_shape(layers=4, kv_heads=4, vocab=128)
COLLECTIVES = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "broadcast",
    "all_gather",
    "all_reduce",
    "all_to_all",
)


@dataclass
class Place:
    """What `RoleGroups` is for a Megatron model: this rank, its layout and groups."""

    layout: ParallelLayout
    rank: int
    tp_group: Any
    pp_group: Any


def place(layout: ParallelLayout) -> Place:
    rank = dist.get_rank()
    own: dict[str, Any] = {}
    for axis in ("tp", "pp"):
        for ranks in sorted({tuple(layout.group_of(r, axis)) for r in range(layout.world_size)}):
            group = dist.new_group(list(ranks))  # every rank makes every group
            if rank in ranks:
                own[axis] = group
    return Place(layout, rank, own["tp"], own["pp"])


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the calls of torch.distributed's collectives."""
    calls: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return originals[name](*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        yield calls
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def publish_three_times(shape: ModelShape, degrees: dict[str, Any], transport: Any, gather: Any) -> dict[str, Any]:
    """Versions 1 to 3, each one higher in every element; the receiver reports what its buffer holds."""
    layout = ParallelLayout(shape.num_layers, **degrees)
    hf = stamped_hf(shape)
    where = place(layout)
    chunks = rank_chunks(shape, layout, where.rank, hf)
    manager = WeightManager(chunks, shape, where, is_active=lambda: True, transport=transport, gather=gather)
    right = []
    for version in (1, 2, 3):
        with counted() as calls:
            buffer = manager.publish(version, verify=True)
        if buffer is not None:
            verify(buffer.manifest, buffer.views())
            right.append(buffer.manifest.weight_version == version and holds(buffer, hf, version - 1, where, gather))
        dist.barrier()  # the caller's duty: nobody writes on while the engine reads
        for chunk in chunks:
            for param in chunk.parameters():
                param.add_(1)
    assert manager.stats is not None
    stats = manager.stats
    manager.close()
    return {
        "right": right,
        "calls": dict(calls),
        "received": stats.received_bytes,
        "formula": stats.formula_bytes,
        "copied": stats.copied_bytes,
    }


def holds(buffer: WeightBuffer, hf: dict[str, torch.Tensor], added: int, where: Place, gather: str) -> bool:
    views = buffer.views()
    own = where.layout.coordinates(where.rank)
    for name, tensor in hf.items():
        wanted = tensor + added
        if gather == "pp" and "norm" not in name:
            dim = 1 if "o_proj" in name or "down_proj" in name else 0
            wanted = wanted.tensor_split(where.layout.tp, dim)[own.tp]
        if not torch.equal(views[name], wanted):
            return False
    return set(views) == set(hf)


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2},
    {"pp": 2},
    {"pp": 2, "vpp": 2},
    {"pp": 2, "layers_per_stage": (3, 1)},
    {"tp": 2, "pp": 2, "vpp": 2},
    {"dp": 2, "pp": 2},
    {"tp": 4},
]


@pytest.mark.parametrize("gather", ["full", "pp"])
@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_every_version_arrives_whole_on_exactly_the_receiving_ranks(
    pool: Pool, degrees: dict[str, Any], tied: bool, transport: str, gather: str
) -> None:
    shape = replace(SHAPE, tied=tied)
    layout = ParallelLayout(shape.num_layers, **degrees)
    results = pool.run(layout.world_size, publish_three_times, shape, degrees, transport, gather)
    receivers = [rank for rank, result in enumerate(results) if result["right"]]
    assert receivers == (list(range(layout.tp)) if gather == "pp" else [0])
    assert all(results[rank]["right"] == [True, True, True] for rank in receivers)


def test_a_steady_shared_memory_sync_is_one_meeting_and_each_byte_is_copied_once(pool: Pool) -> None:
    results = pool.run(4, publish_three_times, SHAPE, {"tp": 2, "dp": 2}, "shared_memory", "full")
    assert [result["calls"] for result in results] == [{"all_reduce": 1}] * 4
    assert sum(result["copied"] for result in results) == 4 * SHAPE.num_parameters
    assert max(result["copied"] for result in results) < 0.3 * 4 * SHAPE.num_parameters


def test_a_steady_collective_sync_is_one_broadcast_for_each_stage_and_tp_rank(pool: Pool) -> None:
    results = pool.run(4, publish_three_times, SHAPE, {"tp": 2, "pp": 2, "vpp": 2}, "collective", "full")
    # ranks 0 and 1 are the first stage: 2 stages over pp, then 2 tp ranks; the last stage only takes part in the first
    assert [result["calls"] for result in results] == [{"broadcast": 4}, {"broadcast": 4}, {"broadcast": 2}, {"broadcast": 2}]


def test_no_rank_receives_more_bytes_than_the_whole_model_less_its_own_share(pool: Pool) -> None:
    model = 4 * SHAPE.num_parameters
    norms = 4 * (2 * 4 + 1) * 8
    full = pool.run(4, publish_three_times, SHAPE, {"tp": 2, "pp": 2}, "collective", "full")
    assert {result["formula"] for result in full} == {model * 3 / 4}
    assert all(
        result["received"] == model - result["copied"] for result in full[:2]
    )  # the first stage's ranks end with the whole
    pp = pool.run(4, publish_three_times, SHAPE, {"tp": 2, "pp": 2}, "collective", "pp")
    assert sum(result["received"] for result in pp) == model + norms == 4 * pp[0]["formula"]


def gather_stages(sizes: list[int]) -> list[Any]:
    rank = dist.get_rank()
    buffers = [torch.full((size,), stage if stage == rank else 255, dtype=torch.uint8) for stage, size in enumerate(sizes)]
    references = [buffer.data_ptr() for buffer in buffers]
    handles = all_gather_pp_params(buffers, dist.group.WORLD)
    held = [handle.tensor.data_ptr() for handle in handles if handle.tensor is not None]
    for handle in handles:
        handle.wait()
        handle.wait()
    waited = all_gather_pp_params(buffers, dist.group.WORLD, async_op=False)
    return [
        [buffer.unique().tolist() for buffer in buffers],
        held == [pointer for pointer, size in zip(references, sizes, strict=True) if size],
        [handle.tensor is None for handle in handles + waited],
    ]


def test_stage_buffers_of_unequal_size_are_gathered_through_handles_that_keep_them_alive(pool: Pool) -> None:
    results = pool.run(3, gather_stages, [1000, 0, 7])
    assert results == [[[[0], [], [2]], True, [True] * 4]] * 3


def tied_copies_differ(transport: Any) -> str:
    shape = replace(SHAPE, tied=True)
    where = place(ParallelLayout(4, tp=2, pp=2, vpp=2))
    chunks = rank_chunks(shape, where.layout, where.rank, stamped_hf(shape))
    manager = WeightManager(chunks, shape, where, is_active=lambda: True, transport=transport)
    manager.publish(1, verify=True)
    if where.rank == 3:
        chunks[1].get_parameter("output_layer.weight")[5, 3] += 0.001953125
    try:
        manager.publish(2, verify=True)
    except RunFailed as error:
        return str(error)
    finally:
        manager.close()
    return ""


@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
def test_copies_of_tied_embeddings_that_drift_apart_are_an_error(pool: Pool, transport: str) -> None:
    messages = pool.run(4, tied_copies_differ, transport)
    assert messages[:3] == ["", "", ""]
    assert messages[3] == (
        "tied weights differ: output_layer.weight of the last stage and the embedding of the first are 0.00195 apart "
        "(rows 64 to 128)"
    )


def two_hosts(transport: Any) -> str:
    where = place(ParallelLayout(4, pp=2))
    manager_module.host_identity = lambda: f"host {where.rank}"
    try:
        manager = WeightManager(
            rank_chunks(SHAPE, where.layout, where.rank, stamped_hf(SHAPE)),
            SHAPE,
            where,
            is_active=lambda: True,
            transport=transport,
        )
    except UserError as error:
        return str(error)
    finally:
        from megappo.pp_weights import transport as transport_module

        manager_module.host_identity = transport_module.host_identity
    manager.publish(1)
    manager.close()
    assert manager.stats is not None
    return f"{manager.stats.received_bytes > 0}"


def test_ranks_on_two_hosts_take_the_collective_way_and_refuse_shared_memory(pool: Pool) -> None:
    assert pool.run(2, two_hosts, "auto") == ["True", "True"]
    for message in pool.run(2, two_hosts, "shared_memory"):
        assert message.startswith("pp_weights.transport=shared_memory needs all ranks on one host")


def read_elsewhere() -> list[str]:
    """The receiver hands path and manifest to a process outside of the world, as to an engine."""
    where = place(ParallelLayout(4, pp=2, vpp=2))
    manager = WeightManager(rank_chunks(SHAPE, where.layout, where.rank, stamped_hf(SHAPE)), SHAPE, where, is_active=lambda: True)
    code = (
        "import sys; from megappo.pp_weights.buffer import *; from megappo.pp_weights.verify import verify\n"
        "b = WeightBuffer.open(sys.argv[1], Manifest.from_json(sys.argv[2])); verify(b.manifest, b.views())\n"
        "sys.stdout.write(f\"{b.manifest.weight_version} {int(b.views()['model.layers.3.mlp.up_proj.weight'][0, 0])}\")"
    )
    buffer = manager.publish(9, verify=True)
    out = []
    if buffer is not None:
        text = buffer.manifest.to_json()
        assert Manifest.from_json(text) == buffer.manifest
        done = subprocess.run([sys.executable, "-c", code, buffer.path, text], capture_output=True, text=True, timeout=60)
        out = [done.stdout, done.stderr]
    dist.barrier()
    manager.close()
    return out


def test_a_process_outside_of_the_world_reads_and_verifies_the_version(pool: Pool) -> None:
    first = int(stamped_hf(SHAPE)["model.layers.3.mlp.up_proj.weight"][0, 0])
    assert pool.run(2, read_elsewhere) == [[f"9 {first}", ""], []]


def export_from_megatron(folder: Path, degrees: dict[str, Any], transport: Any) -> bool:
    """HF folder -> real Megatron chunks -> publish: names and bytes equal the folder's."""
    from megappo.models.families import shape_of
    from megappo.parallel_state.groups import create_role_groups
    from megappo.pp_weights.hf_io import HFReader
    from tests.distributed.bodies import layout_for, load_model

    groups = create_role_groups({"actor": layout_for(folder, degrees)}, seed=1)["actor"]
    chunks = load_model(folder, groups, degrees)
    manager = WeightManager(chunks, shape_of(folder), groups, is_active=lambda: True, transport=transport)
    buffer = manager.publish(1, verify=True)
    equal = True
    if buffer is not None:
        with HFReader(folder) as reader:
            views = buffer.views()
            equal = set(views) == set(reader.names) and all(torch.equal(views[name], reader.read(name)) for name in reader.names)
    dist.barrier()
    manager.close()
    return equal


@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2, "vpp": 2}, {"tp": 2, "pp": 2, "vpp": 2}], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_real_megatron_chunks_export_the_folder_that_they_were_loaded_from(
    pool: Pool, llama_folder: Path, tied_llama_folder: Path, tied: bool, degrees: dict[str, Any], transport: str
) -> None:
    folder = tied_llama_folder if tied else llama_folder
    world = degrees.get("tp", 1) * degrees.get("pp", 1)
    assert all(pool.run(world, export_from_megatron, folder, degrees, transport))
