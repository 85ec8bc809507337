"""Do checkpoints give back, bit for bit and under any layout, what folders and ranks held? Are they whole or not there?"""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megappo.checkpoint import save as save_module
from megappo.checkpoint.convert import convert, export_model, import_dtypes, import_plan
from megappo.checkpoint.load import load_model, load_weights
from megappo.checkpoint.save import Savable, save_model, save_step
from megappo.checkpoint.source import hf_tensors
from megappo.config.schema_models import OptimizerConfig
from megappo.errors import RunFailed, UserError
from megappo.models.families import shape_of
from megappo.models.gpt import DTYPES, GPTChunk, build_chunks
from megappo.models.microbatch import MicroBatch, MicroBatching
from megappo.models.pipeline_model import LossSums, Trainee
from megappo.parallel_state.groups import RoleGroups, create_role_groups
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.buffer import WeightBuffer
from megappo.pp_weights.plan import build_plan
from megappo.pp_weights.update import Bucket, Update
from megappo.trainer.start_check import StartCheck
from tests.distributed.bodies import assemble, exported_pieces
from tests.distributed.ways import Way
from tests.models import make_batch, make_model_folder
from tests.pool import Pool

pytestmark = pytest.mark.distributed

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tp": 2},
    {"pp": 2},
    {"pp": 2, "vpp": 2},
    {"tp": 2, "pp": 2},
    {"pp": 2, "layers_per_stage": (3, 1)},
    {"pp": 2, "vpp": 2, "pipeline_model_parallel_layout": "E|ttt|t|L"},
    {"dp": 2},
]
Named = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, llama_folder: Path, tied_llama_folder: Path) -> dict[str, Path]:
    """Hugging Face folders by what is special about them. Their vocabulary is 61; that of `wide` 90: 96 or 128 rows."""
    base = tmp_path_factory.mktemp("sources")
    folders = {"untied": llama_folder, "tied": tied_llama_folder}
    folders["value"] = make_model_folder(base / "value", head="value")
    folders["biases"] = make_model_folder(base / "biases", "qwen2", tied=True, num_key_value_heads=1)
    folders["all_biases"] = make_model_folder(base / "all_biases", "llama3_biases", num_key_value_heads=1)
    folders["head_norms"] = make_model_folder(base / "head_norms", "qwen3")
    folders["wide"] = make_model_folder(base / "wide", tied=True, vocab_size=90)
    folders["bfloat16"] = cast(llama_folder, base / "bfloat16", torch.bfloat16)
    folders["float16"] = cast(llama_folder, base / "float16", torch.float16)
    folders["mixed"] = cast(folders["value"], base / "mixed", torch.bfloat16, norms=torch.float32)
    folders["sharded"] = cut(tied_llama_folder, base / "sharded")
    return folders


def cast(source: Path, target: Path, dtype: torch.dtype, norms: torch.dtype | None = None) -> Path:
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    cast = {name: t.to(norms if norms and t.dim() == 1 else dtype) for name, t in tensors.items()}
    save_file(cast, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    return target


def cut(source: Path, target: Path) -> Path:
    target.mkdir()
    names: dict[str, list[str]] = {}
    tensors = load_file(source / "model.safetensors")
    for number, name in enumerate(sorted(tensors)):
        names.setdefault(f"part-{number % 3}.safetensors", []).append(name)
    for file, held in names.items():
        save_file({name: tensors[name] for name in held}, target / file)
    index = {"weight_map": {name: file for file, held in names.items() for name in held}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    (target / "tokenizer.json").write_text("{}")
    return target


def held_in(folder: Path) -> Named:
    """Every tensor of a folder, read by safetensors alone."""
    tensors: Named = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    return tensors


def same(got: Named, want: Named) -> bool:
    return set(got) == set(want) and all(
        got[name].dtype == want[name].dtype and torch.equal(as_bits(got[name]), as_bits(want[name])) for name in want
    )


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.itemsize == 2 else torch.int32)


def world_of(degrees: dict[str, Any]) -> int:
    return ParallelLayout(4, **degrees).world_size


# -- on the ranks ---------------------------------------------------------------------------------------------------------------


def built(source: Path, degrees: dict[str, Any], dtype: str = "float32", head: Any = None) -> tuple[list[GPTChunk], RoleGroups]:
    shape = shape_of(source, head)
    groups = create_role_groups({"model": ParallelLayout(shape.num_layers, **degrees)}, seed=1)["model"]
    with groups.active():
        chunks = build_chunks(shape, groups, DTYPES[dtype])
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(77.0)  # what was there before must not matter
    return chunks, groups


def import_to(source: Path, degrees: dict[str, Any], checkpoint: Path) -> None:
    """What `megappo import` does on each rank."""
    plan = import_plan(str(source), str(checkpoint), [f"actor.parallel={json.dumps(degrees)}"])
    convert(plan, checkpoint, *import_dtypes(plan, is_chosen=False))


def import_each(pairs: list[tuple[Path, Path]], degrees: dict[str, Any]) -> None:
    for source, checkpoint in pairs:
        import_to(source, degrees, checkpoint)


def each_equals_its_folder(pairs: list[tuple[Path, Path]], degrees: dict[str, Any]) -> bool:
    return all(equals_folder(checkpoint, source, degrees) for source, checkpoint in pairs)


def equals_folder(checkpoint: Path, source: Path, degrees: dict[str, Any], dtype: str = "float32", head: Any = None) -> bool:
    """A model that is loaded from the checkpoint has the parameters of one that is loaded from the folder, padding included."""
    chunks, groups = built(source, degrees, dtype, head)
    load_model(checkpoint, chunks, groups)
    wanted, groups = built(source, degrees, dtype, head)
    load_weights(source, wanted, groups)
    return all(
        torch.equal(got, want)
        for chunk, other in zip(chunks, wanted, strict=True)
        for got, want in zip(chunk.parameters(), other.parameters(), strict=True)
    )


def save_with_noise_in_the_padding(source: Path, degrees: dict[str, Any], checkpoint: Path) -> int:
    chunks, groups = built(source, degrees)
    load_weights(source, chunks, groups)
    rows = 0
    first = groups.coordinates.tp * chunks[0].shape.padded_vocab_size(groups.layout.tp) // groups.layout.tp
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                padding = parameter.data[max(0, chunks[0].shape.vocab_size - first) :]
                padding.fill_(float("nan"))
                rows += len(padding)
    save_model(checkpoint, Savable(chunks, groups, source))
    return rows


# -- tests ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_a_folder_comes_back_byte_for_byte_through_a_checkpoint_of_any_layout(
    pool: Pool, sources: dict[str, Path], tmp_path: Path, degrees: dict[str, Any]
) -> None:
    kinds = ("untied", "tied", "value", "all_biases", "head_norms")
    pool.run(world_of(degrees), import_each, [(sources[kind], tmp_path / kind) for kind in kinds], degrees)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kinds)
    for kind in kinds:
        assert export_model(str(tmp_path / kind), str(tmp_path / f"{kind}_hf"), []) == 0
        assert same(held_in(tmp_path / f"{kind}_hf"), held_in(sources[kind])), kind


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "mixed", "sharded"])
def test_so_does_a_folder_of_any_dtype_and_of_several_files(
    pool: Pool, sources: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    pool.run(2, import_to, sources[kind], {"pp": 2}, tmp_path / "c")
    export_model(str(tmp_path / "c"), str(tmp_path / "hf"), [])
    assert same(held_in(tmp_path / "hf"), held_in(sources[kind]))
    assert (tmp_path / "hf" / "config.json").read_bytes() == (sources[kind] / "config.json").read_bytes()
    assert (tmp_path / "hf" / "tokenizer.json").exists() == (kind == "sharded")


def test_each_dtype_is_held_in_one_that_keeps_all_its_numbers(pool: Pool, sources: dict[str, Path], tmp_path: Path) -> None:
    held = {}
    for kind in ("bfloat16", "float16", "mixed"):
        pool.run(1, import_to, sources[kind], {}, tmp_path / kind)
        held[kind] = {str(tensor.dtype) for _, tensor in hf_tensors(tmp_path / kind)}
    assert held == {"bfloat16": {"torch.bfloat16"}, "float16": {"torch.float32"}, "mixed": {"torch.float32"}}
    assert export_model(str(tmp_path / "float16"), str(tmp_path / "wide"), ["model.dtype=float32"]) == 0
    assert same(held_in(tmp_path / "wide"), {name: t.float() for name, t in held_in(sources["float16"]).items()})


@pytest.mark.parametrize(
    "before, after",
    [
        ({}, {"tp": 2, "pp": 2}),
        ({"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}),
        ({"pp": 2, "layers_per_stage": (3, 1)}, {"tp": 2}),
        pytest.param({"pp": 2, "vpp": 2}, {"dp": 2, "pp": 2}, marks=pytest.mark.long),
        pytest.param({"tp": 2}, {}, marks=pytest.mark.long),
        ({"pp": 3, "pipeline_model_parallel_layout": "Ettt||tL"}, {"tp": 4}),
    ],
    ids=str,
)
def test_what_one_layout_saved_another_loads(
    pool: Pool, sources: dict[str, Path], tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    pairs = [(sources[kind], tmp_path / kind) for kind in ("untied", "biases", "all_biases", "value")]
    pool.run(world_of(before), import_each, pairs, before)
    assert all(pool.run(world_of(after), each_equals_its_folder, pairs, after))


@pytest.mark.parametrize("before, after", [({}, {"tp": 2, "pp": 2}), ({"tp": 2, "pp": 2}, {})], ids=str)
def test_rows_of_vocabulary_padding_are_neither_loaded_nor_exported(
    pool: Pool, sources: dict[str, Path], tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """Of 90 rows 96 are saved under tp 1 and 128 under tp 2, all that is padding NaN."""
    rows = pool.run(world_of(before), save_with_noise_in_the_padding, sources["wide"], before, tmp_path / "c")
    assert rows == ([6] if not before else [0, 38, 0, 38])  # on both stages, since the embeddings are tied
    assert all(pool.run(world_of(after), equals_folder, tmp_path / "c", sources["wide"], after))
    assert same(dict(hf_tensors(tmp_path / "c")), held_in(sources["wide"]))


def test_a_checkpoint_is_loaded_in_the_dtype_of_the_model(pool: Pool, sources: dict[str, Path], tmp_path: Path) -> None:
    pool.run(2, import_to, sources["untied"], {"tp": 2}, tmp_path / "c")
    assert pool.run(1, equals_folder, tmp_path / "c", sources["untied"], {}, "bfloat16") == [True]
    pool.run(1, import_to, sources["bfloat16"], {}, tmp_path / "d")
    assert pool.run(2, equals_folder, tmp_path / "d", sources["bfloat16"], {"pp": 2}, "float32") == [True, True]


def test_a_critic_starts_from_a_language_models_checkpoint_with_a_head_of_zeros(
    pool: Pool, sources: dict[str, Path], tmp_path: Path
) -> None:
    for kind in ("untied", "tied"):
        pool.run(2, import_to, sources[kind], {"pp": 2}, tmp_path / kind)
        assert all(pool.run(2, equals_folder, tmp_path / kind, sources[kind], {"tp": 2}, "float32", "value"))


def message_of(kind: type[Exception], action: Callable[[], None]) -> str:
    """What the action raises, in words; nothing where it does not."""
    try:
        action()
    except kind as error:
        return str(error)
    return ""


def loading_fails_with(checkpoint: Path, source: Path) -> str:
    chunks, groups = built(source, {"pp": 2})
    return message_of(UserError, lambda: load_model(checkpoint, chunks, groups))


def test_a_checkpoint_of_another_model_is_refused_with_all_that_differs(
    pool: Pool, sources: dict[str, Path], tmp_path: Path
) -> None:
    pool.run(1, import_to, sources["untied"], {}, tmp_path / "c")
    messages = pool.run(2, loading_fails_with, tmp_path / "c", sources["wide"])
    assert messages[0] == messages[1]
    assert "missing: none; unexpected: output_layer.weight; misshapen: embedding.word_embeddings.weight (64, 64)" in messages[0]
    (message,) = set(pool.run(2, loading_fails_with, tmp_path / "c", sources["head_norms"]))
    assert "missing: decoder.layers.0.self_attention.q_layernorm.weight" in message


def train_and_save(actor: Path, critic: Path, folder: Path, distributed: bool) -> Any:
    """Actor on tp2, critic on pp2; one update of the actor; two steps saved. Returns (actor's pieces, critic's pieces)."""
    layouts = {"actor": ParallelLayout(4, tp=2), "critic": ParallelLayout(4, pp=2)}
    if distributed:
        layouts["actor"] = ParallelLayout(4, dp=2)
    roles = create_role_groups(layouts, seed=1)
    savable, models = {}, {}
    for role, source, head in (("actor", actor, None), ("critic", critic, "value")):
        with roles[role].active():
            chunks = build_chunks(shape_of(source, head), roles[role], torch.float32)
        load_weights(source, chunks, roles[role])
        how = OptimizerConfig(lr=1e-2, decay_steps=1, distributed=distributed and role == "actor")
        models[role] = Trainee(chunks, roles[role], MicroBatching(), how, role)
        savable[role] = Savable(chunks, roles[role], source)
    save_step(folder, savable, 1)
    batch = make_batch([3, 4, 2, 5], [4, 2, 3, 4])
    rows, number = Way().rows(roles["actor"], batch)

    def loss(out: torch.Tensor, mb: MicroBatch) -> LossSums:
        return LossSums(out.square().mean(1) @ mb.mask.float(), mb.mask.sum(), {}, {})

    models["actor"].update(rows, number, (), loss, 1)
    save_step(folder, savable, 2)
    return [exported_pieces(models[role]) for role in ("actor", "critic")]


@pytest.mark.parametrize("distributed", [False, True])
def test_a_step_holds_what_actor_and_critic_have_learnt_each_with_its_own_layout(
    pool: Pool, sources: dict[str, Path], tmp_path: Path, distributed: bool
) -> None:
    by_rank = pool.run(2, train_and_save, sources["tied"], sources["tied"], tmp_path / "checkpoints", distributed)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_000001", "step_000002"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000002\n"
    first, second = (dict(hf_tensors(tmp_path / "checkpoints" / f"step_{step:06d}")) for step in (1, 2))
    assert same(first, held_in(sources["tied"]))
    learnt = assemble([pieces[0] for pieces in by_rank])
    assert same(second, learnt)
    assert not torch.equal(second["model.layers.3.mlp.up_proj.weight"], first["model.layers.3.mlp.up_proj.weight"])
    critic = dict(hf_tensors(tmp_path / "checkpoints" / "step_000002" / "critic"))
    assert same(critic, assemble([pieces[1] for pieces in by_rank]))
    assert critic["score.weight"].tolist() == [[0.0] * 64]
    export_model(str(tmp_path / "checkpoints" / "step_000002" / "critic"), str(tmp_path / "critic"), [])
    assert shape_of(tmp_path / "critic").head == "value"


@contextmanager
def files_limited_to(num_bytes: int, on_rank: int) -> Iterator[None]:
    """On one rank no file can grow beyond this: writing fails as on a full disk, half-way through."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if int(os.environ["RANK"]) == on_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def save_again_with_a_full_disk(source: Path, checkpoint: Path, on_rank: int, num_bytes: int) -> tuple[str, list[str]]:
    chunks, groups = built(source, {"pp": 2})  # all parameters 77: not what is there
    with files_limited_to(num_bytes, on_rank):
        message = message_of(RunFailed, lambda: save_model(checkpoint, Savable(chunks, groups, source)))
    return message, [process.name() for process in psutil.Process().children()]


@pytest.mark.parametrize(
    "on_rank, num_bytes, cause",
    [(1, 100_000, "OSError: [Errno 27] File too large"), (0, 100_000, "OSError: [Errno 27] File too large"), (0, 200, "")],
    ids=["rank 1 writes half", "rank 0 writes half", "rank 0 cannot write a small file"],
)
def test_a_write_that_fails_on_one_rank_ends_all_with_the_cause_and_leaves_the_older_folder(
    pool: Pool, sources: dict[str, Path], tmp_path: Path, on_rank: int, num_bytes: int, cause: str
) -> None:
    pool.run(2, import_to, sources["tied"], {"pp": 2}, tmp_path / "c")
    results = pool.run(2, save_again_with_a_full_disk, sources["tied"], tmp_path / "c", on_rank, num_bytes)
    messages = [message for message, _ in results]
    assert messages[0] == messages[1]
    assert f"failed on rank {on_rank}: {cause}" in messages[0]
    assert messages[0].endswith("free some space and start again") or not cause
    assert [children for _, children in results] == [[], []]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert same(dict(hf_tensors(tmp_path / "c")), held_in(sources["tied"]))


def save_with_megatrons_last_file_broken(source: Path, checkpoint: Path) -> str:
    from megatron.core.dist_checkpointing import serialization

    chunks, groups = built(source, {"pp": 2})
    full = OSError(28, "No space left on device")
    # Rank 0 alone calls it, while the others wait at a barrier.
    with mock.patch.object(serialization, "save_config", side_effect=full):
        return message_of(RunFailed, lambda: save_model(checkpoint, Savable(chunks, groups, source)))


def test_rank_0_cannot_leave_the_others_at_megatrons_barrier(pool: Pool, sources: dict[str, Path], tmp_path: Path) -> None:
    messages = pool.run(2, save_with_megatrons_last_file_broken, sources["tied"], tmp_path / "c")
    assert messages[0] == messages[1]
    assert messages[0].endswith("failed on rank 0: OSError: [Errno 28] No space left on device; free some space and start again")
    assert list(tmp_path.iterdir()) == []


def save_without_config(source: Path, checkpoint: Path, absent: Path) -> str:
    chunks, groups = built(source, {"pp": 2})
    return message_of(UserError, lambda: save_model(checkpoint, Savable(chunks, groups, absent)))


def test_a_fault_while_rank_0_completes_the_folder_is_every_ranks_fault(
    pool: Pool, sources: dict[str, Path], tmp_path: Path
) -> None:
    messages = pool.run(2, save_without_config, sources["tied"], tmp_path / "c", tmp_path / "gone")
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"model.path='{tmp_path}/gone' is not a folder")
    assert list(tmp_path.iterdir()) == []


def save_with_a_shard_on_another_disk(source: Path, checkpoint: Path) -> str:
    chunks, groups = built(source, {"pp": 2})
    whole = save_module.write_shards

    def write_and_lose_one(folder: Path, shards: Any) -> None:
        whole(folder, shards)
        if groups.rank == 0:  # before it looks
            (folder / "__1_0.distcp").unlink()

    with mock.patch.object(save_module, "write_shards", write_and_lose_one):
        return message_of(RunFailed, lambda: save_model(checkpoint, Savable(chunks, groups, source)))


def test_hosts_without_a_shared_file_system_are_found_out(pool: Pool, sources: dict[str, Path], tmp_path: Path) -> None:
    messages = pool.run(2, save_with_a_shard_on_another_disk, sources["tied"], tmp_path / "c")
    assert messages[0] == messages[1]
    assert messages[0].endswith("as rank 0 sees it; all ranks must write to one shared file system")
    assert "__1_0.distcp is not in" in messages[0]
    assert list(tmp_path.iterdir()) == []


def save_two_steps_the_second_broken(source: Path, folder: Path) -> str:
    chunks, groups = built(source, {"pp": 2})
    load_weights(source, chunks, groups)
    models = {"actor": Savable(chunks, groups, source), "critic": Savable(chunks, groups, source)}
    save_step(folder, models, 1)
    whole = save_module.write_manifest

    def breaks_at_the_critic(target: Path, manifest: Any) -> None:
        if target.name == "critic":
            raise OSError("no more")
        whole(target, manifest)

    with mock.patch.object(save_module, "write_manifest", breaks_at_the_critic):
        return message_of(RunFailed, lambda: save_step(folder, models, 2))


def test_a_step_that_breaks_at_its_last_model_is_not_there_at_all(pool: Pool, sources: dict[str, Path], tmp_path: Path) -> None:
    messages = pool.run(2, save_two_steps_the_second_broken, sources["tied"], tmp_path / "checkpoints")
    assert messages[0] == messages[1]
    assert messages[0].endswith("failed on rank 0: OSError: no more")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step_000001"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000001\n"


def megatron_reads(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    from megatron.core import dist_checkpointing

    assert dist_checkpointing.check_is_distributed_checkpoint(str(checkpoint))
    found = dist_checkpointing.load_tensors_metadata(str(checkpoint))
    assert dist_checkpointing.serialization.load_content_metadata(str(checkpoint)) == {"non_homogeneous_layers": True}
    return {name: tuple(tensor.global_shape) for name, tensor in found.items()}


def test_the_folder_is_one_of_megatrons_distributed_checkpoints(pool: Pool, sources: dict[str, Path], tmp_path: Path) -> None:
    pool.run(4, import_to, sources["untied"], {"tp": 2, "pp": 2}, tmp_path / "c")
    (shapes,) = pool.run(1, megatron_reads, tmp_path / "c")
    assert shapes["embedding.word_embeddings.weight"] == (64, 64)
    assert shapes["decoder.layers.3.self_attention.linear_qkv.weight"] == (256, 64)
    assert shapes["decoder.layers.3.mlp.linear_fc1.weight"] == (192, 64)
    assert len(shapes) == 4 * 6 + 3


def test_reading_takes_no_part_in_the_world_that_is_there(pool: Pool, sources: dict[str, Path], tmp_path: Path) -> None:
    pool.run(1, import_to, sources["untied"], {}, tmp_path / "c")
    assert pool.run(2, read_on_rank_0, tmp_path / "c", sources["untied"]) == [True, None]


def read_on_rank_0(checkpoint: Path, source: Path) -> bool | None:
    if os.environ["RANK"] == "0":
        return same(dict(hf_tensors(checkpoint)), dict(hf_tensors(source)))
    return None


@pytest.mark.parametrize("path", ["folder", "checkpoint"])
def test_the_start_check_compares_every_published_tensor_with_the_model_path(
    pool: Pool, sources: dict[str, Path], tmp_path: Path, path: str
) -> None:
    pool.run(2, import_to, sources["untied"], {"tp": 2}, tmp_path / "c")
    model_path = str(sources["untied"] if path == "folder" else tmp_path / "c")
    views = held_in(sources["untied"])

    def check(views: Named, **options: Any) -> None:
        layout = ParallelLayout(4, tp=2)
        plan = build_plan(shape_of(sources["untied"]), layout, {name: t.dtype for name, t in views.items()}, **options)
        receiver = StartCheck(plan, model_path)
        receiver.start(Update(0, plan.table, plan.fingerprint, plan.num_buckets, shards=len(plan.targets)))
        for number in range(plan.num_buckets):
            buffers = [WeightBuffer.create(target.buckets[number]) for target in plan.targets]
            for target, buffer in zip(plan.targets, buffers, strict=True):
                for entry in buffer.manifest.entries:
                    whole = target.held(entry.name, views[entry.name])
                    buffer.views()[entry.name].copy_(whole if entry.rows is None else whole[slice(*entry.rows)])
            receiver.settle()
            receiver.load(Bucket(number, tuple(b.path for b in buffers), tuple(b.manifest for b in buffers)))
            for buffer in buffers:
                buffer.close()
        receiver.finish()

    check(views)
    check({name: tensor.bfloat16() for name, tensor in views.items()})  # as the trainer rounds it
    for options in ({"bucket_bytes": 3000}, {"gather": "pp"}, {"gather": "pp", "bucket_bytes": 3000}):
        check(views, **options)
        with pytest.raises(RunFailed, match=r"\d tensors differ, first model\.layers\.2\.mlp\.up_proj\.weight"):
            check(views | {"model.layers.2.mlp.up_proj.weight": views["model.layers.2.mlp.gate_proj.weight"]}, **options)
    with pytest.raises(RunFailed, match=r"1 tensors differ, first model\.norm\.weight"):
        check(views | {"model.norm.weight": views["model.norm.weight"] + 1e-6})
