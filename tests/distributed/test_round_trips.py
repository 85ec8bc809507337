"""Does every byte of a model folder come back through Megatron chunks and the weight manager? And do wrong ways not?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megappo.checkpoint.load import load_weights
from megappo.models.families import _FAMILIES, shape_of
from megappo.models.families.rules import ParamRule
from megappo.models.gpt import GPTChunk, build_chunks
from megappo.parallel_state.groups import RoleGroups, create_role_groups
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.manager import WeightManager
from megappo.pp_weights.naming import get_all_params
from tests.pool import Pool
from tests.stamped import BUFFER, Named, Parts, differences, merge, stamped_folder

pytestmark = pytest.mark.distributed

MISTRAL, QWEN2, QWEN3 = (["MistralForCausalLM"], ["Qwen2ForCausalLM"], ["Qwen3ForCausalLM"])
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"dtypes": "float32"},
    "llama_tied": {"dtypes": "bfloat16", "tie_word_embeddings": True},
    "llama_mixed": {"dtypes": "mixed", "num_key_value_heads": 4},
    "llama_no_padding": {"dtypes": "bfloat16", "vocab_size": 128},
    "llama_empty_shards": {"dtypes": "mixed", "vocab_size": 29, "tie_word_embeddings": True},
    "llama_attention_bias": {"dtypes": "bfloat16", "attention_bias": True, "num_key_value_heads": 1},
    "llama_mlp_bias": {"dtypes": "mixed", "mlp_bias": True, "tie_word_embeddings": True},
    "llama_biases": {"dtypes": "float32", "attention_bias": True, "mlp_bias": True},
    "llama_value": {"dtypes": "float32", "architectures": ["LlamaForSequenceClassification"], "num_labels": 1},
    "mistral_one_kv": {"dtypes": "bfloat16", "architectures": MISTRAL, "num_key_value_heads": 1},
    "qwen2_tied": {"dtypes": "mixed", "architectures": QWEN2, "tie_word_embeddings": True},
    "qwen2_one_kv": {"dtypes": "float32", "architectures": QWEN2, "num_attention_heads": 8, "num_key_value_heads": 1},
    "qwen3": {"dtypes": "mixed", "architectures": QWEN3, "head_dim": 10},
    "qwen3_one_kv_tied": {"dtypes": "bfloat16", "architectures": QWEN3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "with_buffer": {"dtypes": "mixed", "has_buffer": True},
}
ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2}),
    "tp4": (2, {"tp": 4}),
    "tp2_dp2": (2, {"tp": 2, "dp": 2}),
    "pp2_vpp2": (4, {"pp": 2, "vpp": 2}),
    "tp2_pp2_vpp2": (4, {"tp": 2, "pp": 2, "vpp": 2}),
    "dp2_pp2_vpp3": (6, {"dp": 2, "pp": 2, "vpp": 3}),
    "first_and_last": (5, {"pp": 4, "num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 2}),
    "last_of_trap_a2": (10, {"pp": 3, "vpp": 2, "num_layers_in_last_pipeline_stage": 2}),
    "stages": (6, {"tp": 2, "pp": 2, "vpp": 2, "layers_per_stage": (4, 2)}),
    "ends_count": (4, {"tp": 2, "pp": 2, "vpp": 3, **ENDS}),
    "ends_alone": (2, {"pp": 4, **ENDS}),
    "written_out": (5, {"tp": 2, "pp": 2, "vpp": 2, "pipeline_model_parallel_layout": "Et|ttt||tL"}),
}
ALL = tuple(SHAPES)
SOME = ("llama_biases", "llama_tied", "qwen2_one_kv", "qwen3", "with_buffer")
CHOSEN = {layout: ALL if layout in ("tp2", "tp4", "tp2_pp2_vpp2", "stages", "written_out") else SOME for layout in LAYOUTS}
MAKE = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> MAKE:
    """(name of a shape, layers) -> its folder."""
    base, made = tmp_path_factory.mktemp("stamped"), {}

    def folder(name: str, layers: int) -> Path:
        if (name, layers) not in made:
            made[name, layers] = stamped_folder(base / f"{name}_{layers}", layers, **SHAPES[name])
        return made[name, layers]

    return folder


# -- on the ranks ---------------------------------------------------------------------------------------------------------------


def loaded(folder: Path, dtypes: str, groups: RoleGroups) -> list[GPTChunk]:
    """Real chunks with the folder's weights, in the folder's dtypes."""
    with groups.active():
        chunks = build_chunks(shape_of(folder), groups, torch.float32 if dtypes == "float32" else torch.bfloat16)
    for chunk in chunks:
        if folder.name.startswith("with_buffer"):
            for layer in chunk.decoder.layers:
                layer.mlp.register_buffer("gate_bias", torch.zeros(chunk.shape.hidden_size))
        for param in chunk.parameters():
            if dtypes == "mixed" and param.dim() == 1:
                param.data = param.data.float()
    load_weights(folder, chunks, groups)
    return chunks


def published(chunks: Sequence[GPTChunk], groups: RoleGroups, transport: Any) -> Named | None:
    """Everything that the manager hands over, by name; None where nothing is received."""
    manager = WeightManager(chunks, chunks[0].shape, groups, is_active=lambda: True, transport=transport)
    buffer = manager.publish(1, verify=True)
    tensors = None if buffer is None else {name: view.clone() for name, view in buffer.views().items()}
    dist.barrier()
    manager.close()
    return tensors


def round_trips(folders: list[tuple[Path, str]], degrees: dict[str, Any], transport: Any) -> dict[str, list[str]]:
    """Folder name -> what differs after the way there and back; filled on the rank that receives."""
    layers = shape_of(folders[0][0]).num_layers
    groups = create_role_groups({"actor": ParallelLayout(layers, **degrees)}, seed=1)["actor"]
    buffer_rule = ParamRule("decoder.layers.{layer}.mlp.gate_bias", (BUFFER,), "replicated")
    found = {}
    for folder, dtypes in folders:
        llama = _FAMILIES["llama"]
        rules = (*llama.RULES, buffer_rule) if folder.name.startswith("with_buffer") else llama.RULES
        with mock.patch.object(llama, "RULES", rules):
            tensors = published(loaded(folder, dtypes, groups), groups, transport)
        if tensors is not None:
            found[folder.name] = differences(tensors, folder)
    return found


def shards_of_all(folder: Path, dtypes: str, degrees: dict[str, Any]) -> Parts:
    """[stage][chunk][tp rank]{name: shard} on rank 0, empty elsewhere."""
    layout = ParallelLayout(shape_of(folder).num_layers, **degrees)
    groups = create_role_groups({"actor": layout}, seed=1)["actor"]
    own = get_all_params(loaded(folder, dtypes, groups))
    gathered: list[Any] | None = [None] * layout.world_size if groups.rank == 0 else None
    dist.gather_object([{name: tensor.detach() for name, tensor in chunk.items()} for chunk in own], gathered)
    if gathered is None:
        return []
    return [
        [[gathered[layout.rank_of(tp=tp, pp=stage)][chunk] for tp in range(layout.tp)] for chunk in range(layout.vpp)]
        for stage in range(layout.pp)
    ]


# -- tests ----------------------------------------------------------------------------------------------------------------------


def test_there_are_at_least_sixty_combinations() -> None:
    assert sum(map(len, CHOSEN.values())) >= 60


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_of_a_folder_comes_back_from_real_megatron_chunks(pool: Pool, make: MAKE, layout: str) -> None:
    layers, degrees = LAYOUTS[layout]
    folders = [(make(name, layers), str(SHAPES[name]["dtypes"])) for name in CHOSEN[layout]]
    transport = "collective" if list(LAYOUTS).index(layout) % 2 else "shared_memory"
    world = ParallelLayout(layers, **degrees).world_size
    received, *others = pool.run(world, round_trips, folders, degrees, transport)
    assert received == {folder.name: [] for folder, _ in folders}
    assert others == [{}] * (world - 1)


def test_the_stamps_tell_every_row_from_every_other(make: MAKE) -> None:
    from safetensors.torch import load_file

    for name in ("llama_biases", "qwen2_tied", "qwen3_one_kv_tied"):
        tensors = load_file(make(name, 10) / "model.safetensors").values()
        rows = [row.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors for row in t.reshape(t.shape[0], -1)]
        assert len(set(rows)) == len(rows)


WRONG: dict[str, dict[str, Any]] = {
    "local layer numbers": {"numbers": "local"},
    "chunks of a rank one after the other": {"numbers": "rank_major"},
    "equal thirds of the fused qkv": {"qkv": "thirds"},
    "halves of the joined gate and up shards": {"gated": "halves"},
}


@pytest.mark.parametrize(
    "name, layout",
    [("qwen2_tied", "tp2_pp2_vpp2"), ("llama_biases", "stages"), ("qwen3", "ends_count"), ("llama_value", "tp2_pp2_vpp2")],
)
def test_wrong_ways_fail_the_comparison_that_the_right_way_passes(pool: Pool, make: MAKE, name: str, layout: str) -> None:
    layers, degrees = LAYOUTS[layout]
    folder = make(name, layers)
    parts = pool.run(4, shards_of_all, folder, SHAPES[name]["dtypes"], degrees)[0]
    assert differences(merge(parts, folder), folder) == []
    for what, how in WRONG.items():
        wrong = differences(merge(parts, folder, **how), folder)
        kinds = {tensor.split(".")[-2] for tensor in wrong}
        if "numbers" in how:
            assert kinds >= {"q_proj", "gate_proj", "down_proj", "input_layernorm"}, what
        else:
            assert kinds == ({"q_proj", "k_proj", "v_proj"} if "qkv" in how else {"gate_proj", "up_proj"}), what
