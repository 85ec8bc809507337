"""Do several ranks hand over exactly the model, through both transports, with few collectives and no more bytes than needed?"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megappo.errors import RunFailed, UserError
from megappo.models.shape import ModelShape
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights import manager as manager_module
from megappo.pp_weights.assemble import Assembler
from megappo.pp_weights.buffer import WeightBuffer
from megappo.pp_weights.cuda_ipc import memory_of
from megappo.pp_weights.manager import WeightManager
from megappo.pp_weights.manifest import Manifest
from megappo.pp_weights.transport import all_gather_pp_params
from megappo.pp_weights.update import Bucket, Update
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


class Reader:
    """A receiver that keeps what it reads, and that reads each bucket only when the next one is there: memory that is written too
    early shows. With fail_at it raises at that bucket."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.tensors: list[dict[str, torch.Tensor]] = []
        self.steps: list[str] = []
        self._fail_at = fail_at

    def start(self, update: Update) -> None:
        self.steps = ["start"]
        self.tensors = [{} for _ in range(update.shards)]
        self._assemblers = [Assembler(update) for _ in range(update.shards)]
        self._waiting: Bucket | None = None

    def settle(self) -> None:
        self.steps.append("settle")
        time.sleep(0.002)  # the other ranks have written the next bucket by now, if they may
        if self._waiting is not None:
            parts = zip(self._assemblers, self.tensors, self._waiting.paths, self._waiting.manifests, strict=True)
            for assembler, tensors, path, manifest in parts:
                with memory_of(path, manifest) as views:
                    tensors |= {name: tensor.clone() for name, tensor in assembler.tensors(manifest, views)}
        self._waiting = None

    def load(self, bucket: Bucket) -> None:
        self.steps.append("load")
        if bucket.index == self._fail_at:
            raise RunFailed("this engine is ill")
        self._waiting = bucket

    def finish(self) -> None:
        self.settle()
        self.steps[-1] = "finish"
        for assembler in self._assemblers:
            assembler.finish()


BUCKET_BYTES = 700  # cuts most matrices of SHAPE


def stream_three_times(manager: WeightManager, case: Case, hosts: tuple[int, ...]) -> dict[str, Any]:
    """Versions 1 to 3 in small buckets to an engine on each of the ranks `hosts`, and once more through `iterate`."""
    where, hf, gather = case.where, case.hf, case.gather
    reader = Reader() if where.rank in hosts and manager.serves_here else None
    right = []
    for version in (1, 2, 3):
        with counted() as calls:
            assert manager.publish(version, verify=version == 2, receiver=reader) is None
        if reader is not None:
            for tp, found in enumerate(reader.tensors):
                right.append(same(found, {n: held(t + version - 1, n, where, gather, tp) for n, t in hf.items()}))
        case.change()
    if gather == "full":
        found = {name: None if tensor is None else tensor.clone() for name, tensor in manager.iterate(4)}
        assert list(found) == list(manager.table)
        if manager.is_receiver:
            right.append(same(found, {name: tensor + 3 for name, tensor in hf.items()}))
    return {
        "right": right,
        "steps": reader.steps if reader else None,
        "calls": dict(calls),
        "num_buckets": manager.plan.num_buckets,
        "slots": sum(slot.data.numel() for slot in manager._transport.slots),
    }


def held(tensor: torch.Tensor, name: str, where: Place, gather: str, tp: int) -> torch.Tensor:
    """What the worker `tp` of an engine gets."""
    if gather == "full" or "norm" in name:
        return tensor
    return tensor.tensor_split(where.layout.tp, 1 if "o_proj" in name or "down_proj" in name else 0)[tp]


def same(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def publish_three_times(manager: WeightManager, case: Case) -> dict[str, Any]:
    """Versions 1 to 3, each one higher in every element; the receiver reports what its buffer holds."""
    right = []
    for version in (1, 2, 3):
        with counted() as calls:
            buffer = manager.publish(version, verify=version < 3)
        if buffer is not None:
            if version < 3:
                verify(buffer.manifest, buffer.views())
            right.append(buffer.manifest.weight_version == version and holds(buffer, case, version - 1))
        case.change()
    stats = manager.stats
    return {
        "right": right,
        "calls": dict(calls),
        "received": stats.received_bytes,
        "formula": stats.formula_bytes,
        "copied": stats.copied_bytes,
    }


@dataclass
class Case:
    """One model on this rank, and how it is handed over."""

    where: Place
    shape: ModelShape
    gather: str
    hf: dict[str, torch.Tensor]
    chunks: list[Any]

    def change(self) -> None:
        dist.barrier()  # the caller's duty: nobody writes on while the engine reads
        for chunk in self.chunks:
            for param in chunk.parameters():
                param.add_(1)


COMBINATIONS = list(product((False, True), ("shared_memory", "collective"), ("full", "pp")))  # tied, transport, gather


def every_way(degrees: dict[str, Any], body: Any, options: dict[str, Any], *args: Any) -> dict[Any, dict[str, Any]]:
    """The body for each of COMBINATIONS, in one world."""
    layout = ParallelLayout(SHAPE.num_layers, **degrees)
    where = place(layout)
    found = {}
    for tied, transport, gather in COMBINATIONS:
        shape = replace(SHAPE, tied=tied)
        hf = stamped_hf(shape)
        case = Case(where, shape, gather, hf, rank_chunks(shape, layout, where.rank, hf))
        how: dict[str, Any] = {"transport": transport, "gather": gather, **options}
        manager = WeightManager(case.chunks, shape, where, is_active=lambda: True, **how)
        found[tied, transport, gather] = body(manager, case, *args)
        dist.barrier()
        manager.close()
    return found


def holds(buffer: WeightBuffer, case: Case, added: int) -> bool:
    tp = case.where.layout.coordinates(case.where.rank).tp
    return same(buffer.views(), {n: held(t + added, n, case.where, case.gather, tp) for n, t in case.hf.items()})


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2},
    {"pp": 2},
    {"pp": 2, "vpp": 2},
    {"pp": 2, "layers_per_stage": (3, 1)},
    {"tp": 2, "pp": 2, "vpp": 2},
    {"dp": 2, "pp": 2},
    {"tp": 4},
]


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_every_version_arrives_whole_on_exactly_the_receiving_ranks(pool: Pool, degrees: dict[str, Any]) -> None:
    layout = ParallelLayout(SHAPE.num_layers, **degrees)
    by_rank = pool.run(layout.world_size, every_way, degrees, publish_three_times, {})
    for way in COMBINATIONS:
        results = [found[way] for found in by_rank]
        receivers = [rank for rank, result in enumerate(results) if result["right"]]
        assert receivers == (list(range(layout.tp)) if way[2] == "pp" else [0]), way
        assert all(results[rank]["right"] == [True, True, True] for rank in receivers), way


STREAMED: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 2, "pp": 2, "vpp": 2},
    {"dp": 2, "pp": 2},
    {"pp": 2, "layers_per_stage": (3, 1)},
]


@pytest.mark.parametrize("degrees", STREAMED, ids=str)
def test_buckets_bring_every_version_to_engines_on_any_rank_within_two_buckets_of_memory(
    pool: Pool, degrees: dict[str, Any]
) -> None:
    layout = ParallelLayout(SHAPE.num_layers, **degrees)
    world, tp, pp = layout.world_size, layout.tp, layout.pp
    options = {"mode": "bucketed", "bucket_bytes": BUCKET_BYTES}
    by_rank = pool.run(world, every_way, degrees, stream_three_times, options, (0, world - 1))
    row = 4 * max(tensor[0].numel() for tensor in stamped_hf(SHAPE).values())
    for way in COMBINATIONS:
        _, transport, gather = way
        results = [found[way] for found in by_rank]
        count = results[0]["num_buckets"]
        assert count > 10
        hosts = (0, world - 1) if transport == "shared_memory" else (0,)
        for rank in hosts:
            assert results[rank]["right"] and all(results[rank]["right"]), (way, rank)
            assert results[rank]["steps"] == ["start", *["settle", "load"] * count, "finish"]
        assert max(result["slots"] for result in results) <= 2 * max(BUCKET_BYTES, row)
        assert not any("object" in name for result in results for name in result["calls"])
        if transport == "shared_memory":
            assert [result["calls"] for result in results] == [{}] * world
        else:
            most = max(sum(result["calls"].values()) for result in results)
            meetings = 2 if gather == "pp" and tp > 1 else 0  # two receivers of one engine
            assert most <= (pp * (pp > 1) + tp * (tp > 1) * (gather == "full") + meetings) * count


def one_engine_fails(transport: Any, fail_at: int) -> list[Any]:
    where = place(ParallelLayout(4, tp=2, pp=2))
    chunks = rank_chunks(SHAPE, where.layout, where.rank, stamped_hf(SHAPE))
    options: dict[str, Any] = {"mode": "bucketed", "bucket_bytes": BUCKET_BYTES}
    manager = WeightManager(chunks, SHAPE, where, is_active=lambda: True, transport=transport, **options)
    ill, well = Reader(fail_at), Reader()
    told = ""
    try:
        manager.publish(1, receiver=ill if where.rank == 0 else well if manager.serves_here else None)
    except RunFailed as error:
        told = str(error)
    dist.barrier()  # the caller's duty, here and below: a publish is over once it is over on all ranks
    before = (ill if where.rank == 0 else well).steps[-1:]
    manager.publish(2, receiver=well if manager.serves_here else None)
    whole = bool(well.tensors) and same(well.tensors[0], stamped_hf(SHAPE))
    dist.barrier()
    manager.close()
    return [told, before, whole]


@pytest.mark.parametrize("fail_at", [0, 7])
@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
def test_an_engine_that_fails_in_the_middle_holds_nobody_up_and_the_next_version_repairs(
    pool: Pool, transport: str, fail_at: int
) -> None:
    others = ["", ["finish"], True] if transport == "shared_memory" else ["", [], False]
    assert pool.run(4, one_engine_fails, transport, fail_at) == [["this engine is ill", ["load"], True], *[others] * 3]


def results_of(pool: Pool, degrees: dict[str, Any], transport: str, gather: str) -> list[dict[str, Any]]:
    world = ParallelLayout(SHAPE.num_layers, **degrees).world_size
    return [found[False, transport, gather] for found in pool.run(world, every_way, degrees, publish_three_times, {})]


def test_a_steady_shared_memory_sync_has_no_collective_and_each_byte_is_copied_once(pool: Pool) -> None:
    results = results_of(pool, {"tp": 2, "dp": 2}, "shared_memory", "full")
    assert [result["calls"] for result in results] == [{}] * 4
    assert sum(result["copied"] for result in results) == 4 * SHAPE.num_parameters
    assert max(result["copied"] for result in results) < 0.3 * 4 * SHAPE.num_parameters


def test_a_steady_collective_sync_is_one_broadcast_for_each_stage_and_tp_rank(pool: Pool) -> None:
    results = results_of(pool, {"tp": 2, "pp": 2, "vpp": 2}, "collective", "full")
    # ranks 0 and 1 are the first stage: 2 stages over pp, then 2 tp ranks; the last stage only takes part in the first
    assert [result["calls"] for result in results] == [{"broadcast": 4}, {"broadcast": 4}, {"broadcast": 2}, {"broadcast": 2}]


def test_no_rank_receives_more_bytes_than_the_whole_model_less_its_own_share(pool: Pool) -> None:
    model = 4 * SHAPE.num_parameters
    norms = 4 * (2 * 4 + 1) * 8
    full = results_of(pool, {"tp": 2, "pp": 2}, "collective", "full")
    assert {result["formula"] for result in full} == {model * 3 / 4}
    assert all(
        result["received"] == model - result["copied"] for result in full[:2]
    )  # the first stage's ranks end with the whole
    pp = results_of(pool, {"tp": 2, "pp": 2}, "collective", "pp")
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
        "tied weights differ: output_layer.weight of the last stage and the embedding of the first are 0.00195 apart"
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
