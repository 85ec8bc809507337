"""Is every HF tensor cut into Megatron shards and put together again bit for bit, in every layout? And do naive ways fail?"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megappo.errors import RunFailed, UserError
from megappo.models.families.rules import ParamRule
from megappo.models.shape import ModelShape
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.buffer import WeightBuffer
from megappo.pp_weights.mapping import Piece, chunk_pieces, expected_hf_tensors, rule_pieces
from megappo.pp_weights.plan import build_plan, check_coverage
from tests.fake_chunks import chunk_params, make_shape, stamped_hf

SHAPES = {
    "gqa": make_shape(),
    "gqa_tied": make_shape(tied=True),
    "mha": make_shape(kv_heads=4, vocab=128),
    "gqa_wide": make_shape(heads=16, kv_heads=4, vocab=1003),
    "one_kv_head": make_shape(kv_heads=1),
    "one_kv_head_of_six": make_shape(heads=12, kv_heads=1, head_dim=6, tied=True),
    "value_head": make_shape(head="value"),
    "attention_bias": replace(make_shape(kv_heads=1), qkv_bias=True, proj_bias=True),
    "mlp_bias_value_head": replace(make_shape(head="value"), mlp_bias=True),
    "biases_tied": replace(make_shape(tied=True), qkv_bias=True, proj_bias=True, mlp_bias=True),
    "qwen2": replace(make_shape(tied=True), family="qwen2", qkv_bias=True),
    "qwen2_one_kv_head": replace(make_shape(heads=8, kv_heads=1), family="qwen2", qkv_bias=True),
    "qwen3": replace(make_shape(head_dim=6), family="qwen3", qk_norm=True),
}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (4, {}),
    (4, {"tp": 2}),
    (4, {"pp": 2}),
    (4, {"pp": 2, "vpp": 2}),
    (4, {"tp": 2, "pp": 2, "vpp": 2}),
    (6, {"pp": 2, "vpp": 3}),
    (6, {"tp": 2, "pp": 2, "vpp": 3}),
    (5, {"pp": 2, "layers_per_stage": (2, 3)}),
    (6, {"tp": 2, "pp": 2, "vpp": 2, "layers_per_stage": (4, 2)}),
    (10, {"pp": 3, "vpp": 2, "layers_per_stage": (4, 4, 2)}),
    (10, {"pp": 3, "vpp": 2, "num_layers_in_last_pipeline_stage": 2}),
    (6, {"pp": 2, "num_layers_in_first_pipeline_stage": 2}),
    (6, {"pp": 2, "vpp": 2, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}),
    (5, {"tp": 2, "pp": 2, "vpp": 3, "pipeline_model_parallel_layout": "E|ttt||t|t|L"}),
    (4, {"tp": 2, "pp": 2, "dp": 2}),
    (4, {"pp": 2, "dp": 2, "cp": 2}),
    (4, {"tp": 4}),
    (4, {"tp": 4, "pp": 2, "vpp": 2}),
]


def all_ranks_write(shape: ModelShape, layout: ParallelLayout, gather: Any, num_writers: int) -> list[dict[str, torch.Tensor]]:
    """HF -> shards of all ranks -> plan -> HF buffers, in one process. Buffers start as rubbish."""
    hf = stamped_hf(shape)
    plan = build_plan(shape, layout, {name: t.dtype for name, t in hf.items()}, gather=gather, num_writers=num_writers)
    buffers = [WeightBuffer.create(target.buckets[0]) for target in plan.targets]
    for buffer in buffers:
        buffer.data.fill_(255)
    for rank in range(layout.world_size):
        own = layout.coordinates(rank)
        params = [chunk_params(shape, layout, own.tp, own.pp, chunk, hf) for chunk in range(layout.vpp)]
        for write in plan.writes[rank][0]:
            name = write.piece.hf_name
            write.piece.hf(buffers[write.target].views()[name]).copy_(write.source(params[write.chunk][write.piece.param]))
    return [buffer.views() for buffer in buffers]


@pytest.mark.parametrize("shape_name", SHAPES)
@pytest.mark.parametrize("layers, degrees", LAYOUTS, ids=str)
def test_every_element_comes_back_under_its_complete_name(shape_name: str, layers: int, degrees: dict[str, Any]) -> None:
    shape = replace(SHAPES[shape_name], num_layers=layers)
    layout = ParallelLayout(layers, **degrees)
    (views,) = all_ranks_write(shape, layout, "full", layout.dp * layout.cp)
    hf = stamped_hf(shape)
    assert set(views) == set(hf)
    assert [name for name in hf if not torch.equal(views[name], hf[name])] == []


@pytest.mark.parametrize("layers, degrees", LAYOUTS, ids=str)
def test_gather_pp_gives_each_tp_rank_its_shard_of_every_tensor(layers: int, degrees: dict[str, Any]) -> None:
    shape = replace(SHAPES["biases_tied"], num_layers=layers)
    layout = ParallelLayout(layers, **degrees)
    hf = stamped_hf(shape)
    if shape.num_kv_heads % layout.tp:  # an engine's worker would want a whole KV head, and a copy of it
        with pytest.raises(UserError, match="tp=4 ranks, which must divide num_key_value_heads=2"):
            all_ranks_write(shape, layout, "pp", 1)
        return
    shards = all_ranks_write(shape, layout, "pp", 1)
    assert len(shards) == layout.tp
    for name, full in hf.items():
        if "norm" in name or name.endswith(("o_proj.bias", "down_proj.bias")):
            assert all(torch.equal(shard[name], full) for shard in shards)
        else:
            dim = 1 if "o_proj" in name or "down_proj" in name else 0
            assert torch.equal(torch.cat([shard[name] for shard in shards], dim), full), name


def test_expected_tensors_are_the_models() -> None:
    shape = make_shape(layers=2)
    expected = expected_hf_tensors(shape)
    assert len(expected) == 2 * 9 + 3
    assert expected["model.layers.1.self_attn.q_proj.weight"] == (16, 8)
    assert expected["model.layers.0.self_attn.v_proj.weight"] == (8, 8)
    assert expected["model.layers.0.self_attn.o_proj.weight"] == (8, 16)
    assert expected["model.layers.1.mlp.gate_proj.weight"] == (12, 8)
    assert expected["model.layers.1.mlp.down_proj.weight"] == (8, 12)
    assert expected["lm_head.weight"] == (61, 8)
    assert "lm_head.weight" not in expected_hf_tensors(make_shape(tied=True))
    assert expected_hf_tensors(make_shape(head="value"))["score.weight"] == (1, 8)
    assert sum(torch.Size(size).numel() for size in expected.values()) == shape.num_parameters


def test_expected_biases_are_those_that_the_model_has() -> None:
    attention = {"q": 16, "k": 8, "v": 8, "o": 8}
    mlp = {"gate": 12, "up": 12, "down": 8}
    parts = {"self_attn": attention, "mlp": mlp}
    biases = {part: {f"model.layers.0.{part}.{x}_proj.bias": (size,) for x, size in of.items()} for part, of in parts.items()}
    plain = expected_hf_tensors(make_shape(layers=1))
    for fields, parts_with in (
        ({"qkv_bias": True, "proj_bias": True}, ["self_attn"]),
        ({"mlp_bias": True}, ["mlp"]),
        ({"qkv_bias": True, "proj_bias": True, "mlp_bias": True}, ["self_attn", "mlp"]),
    ):
        shape = replace(make_shape(layers=1), **fields)
        expected = expected_hf_tensors(shape)
        assert {name: size for name, size in expected.items() if name not in plain} == {
            name: size for part in parts_with for name, size in biases[part].items()
        }
        assert sum(torch.Size(size).numel() for size in expected.values()) == shape.num_parameters


@pytest.mark.parametrize("name", ["self_attn.o_proj", "mlp.down_proj"])
def test_the_bias_of_a_row_cut_layer_is_whole_on_every_rank_and_leaves_from_the_first(name: str) -> None:
    shape = replace(make_shape(layers=1), qkv_bias=True, proj_bias=True, mlp_bias=True)
    pieces = [p for t in range(2) for p in chunk_pieces(shape, ParallelLayout(1, tp=2), t, 0, 0) if f"{name}.bias" in p.hf_name]
    assert [(p.param_shape, p.start, p.stop, p.role) for p in pieces] == [((8,), 0, 8, "owner"), ((8,), 0, 8, "replica")]


QKV = ParamRule("linear_qkv.weight", ("q.weight", "k.weight", "v.weight"), "qkv")


def labelled_qkv() -> tuple[ModelShape, dict[str, torch.Tensor]]:
    """8 heads, 2 groups, head_dim 4; a row's label is kind * 100 + head * 10 + dim."""
    shape = replace(make_shape(heads=8, kv_heads=2), hidden_size=1)
    rows = {
        kind: torch.tensor([[number * 100 + head * 10 + d] for head in range(heads) for d in range(4)])
        for number, (kind, heads) in enumerate({"q": 8, "k": 2, "v": 2}.items(), start=1)
    }
    return shape, {f"{kind}.weight": value for kind, value in rows.items()}


def cut(rule: ParamRule, shape: ModelShape, tp: int, hf: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    shards = []
    for rank in range(tp):
        pieces = rule_pieces(rule, shape, tp, rank)
        shards.append(torch.zeros(pieces[0].param_shape, dtype=torch.int64))
        for piece in pieces:
            piece.local(shards[-1]).copy_(piece.hf(hf[piece.hf_name]))
    return shards


@pytest.mark.parametrize("tp", [1, 2])
def test_fused_qkv_holds_queries_key_value_of_each_group_in_turn(tp: int) -> None:
    shape, hf = labelled_qkv()
    heads = torch.cat(cut(QKV, shape, tp, hf))[::4, 0].tolist()
    assert heads == [100, 110, 120, 130, 200, 300, 140, 150, 160, 170, 210, 310]


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize(
    "tp, shards",
    [
        (4, [[100, 110, 120], [130, 200, 300], [140, 150, 160], [170, 210, 310]]),  # 2 ranks a group: 3 of its 6 heads each
        (
            8,
            [[100, 110], [110, 120], [130, 200], [200, 300], [140, 150], [150, 160], [170, 210], [210, 310]],
        ),  # 6 rows: 1.5 heads
    ],
)
def test_ranks_that_share_a_kv_head_hold_equal_runs_of_its_groups_rows(tp: int, shards: list[list[int]], kind: str) -> None:
    shape, hf = labelled_qkv()
    rule = ParamRule(f"linear_qkv.{kind}", tuple(f"{x}.{kind}" for x in "qkv"), "qkv")
    if kind == "bias":
        hf = {name.replace("weight", "bias"): value[:, 0] for name, value in hf.items()}
    found = [shard.reshape(-1).tolist() for shard in cut(rule, shape, tp, hf)]
    assert [sorted({row // 10 * 10 for row in shard}) for shard in found] == shards
    (fused,) = cut(rule, shape, 1, hf)
    assert [row for shard in found for row in shard] == fused.reshape(-1).tolist()  # what Megatron's all-gather puts together


def test_equal_thirds_of_a_fused_qkv_would_be_wrong() -> None:
    shape, hf = labelled_qkv()
    (fused,) = cut(QKV, shape, 1, hf)
    assert not torch.equal(fused[:32], hf["q.weight"])  # the naive split takes the first rows as q
    naive = torch.cat([hf["q.weight"], hf["k.weight"], hf["v.weight"]])
    assert not torch.equal(fused, naive)


def test_a_fused_qkv_bias_is_cut_like_its_weight() -> None:
    shape, hf = labelled_qkv()
    rule = ParamRule("linear_qkv.bias", ("q.bias", "k.bias", "v.bias"), "qkv")
    biases = cut(rule, shape, 2, {name.replace("weight", "bias"): value[:, 0] for name, value in hf.items()})
    assert [b.tolist() for b in biases] == [w[:, 0].tolist() for w in cut(QKV, shape, 2, hf)]


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_each_tp_shard_holds_its_gate_rows_then_its_up_rows(kind: str) -> None:
    shape = replace(make_shape(), ffn_size=8, hidden_size=1)
    gate, up = torch.arange(8), torch.arange(8) + 100
    hf = {f"gate.{kind}": gate, f"up.{kind}": up}
    if kind == "weight":
        hf = {name: value[:, None] for name, value in hf.items()}
    shards = cut(ParamRule(f"linear_fc1.{kind}", (f"gate.{kind}", f"up.{kind}"), "gate_up"), shape, 2, hf)
    assert [shard.reshape(-1).tolist() for shard in shards] == [
        [0, 1, 2, 3, 100, 101, 102, 103],
        [4, 5, 6, 7, 104, 105, 106, 107],
    ]
    halves = torch.cat(shards).reshape(-1).chunk(2)  # the naive way: concatenate the shards, split in the middle
    assert not torch.equal(halves[0], gate)


def test_the_vocabulary_is_padded_on_megatrons_side_only() -> None:
    shape = replace(make_shape(), vocab_size=33)  # padded to 128 rows at tp 4 (32 each)
    rule = ParamRule("word_embeddings.weight", ("e",), "vocab", "embedding")
    pieces = [rule_pieces(rule, shape, 4, rank)[0] for rank in range(4)]
    assert [(p.start, p.stop) for p in pieces] == [(0, 32), (32, 33), (33, 33), (33, 33)]
    assert {p.param_shape for p in pieces} == {(32, 8)}
    check_coverage({"e": (33, 8)}, pieces)


def test_the_tied_copy_of_the_last_stage_is_loaded_but_never_exported() -> None:
    shape, layout = make_shape(tied=True), ParallelLayout(4, pp=2, vpp=2)
    (copy,) = [piece for piece in chunk_pieces(shape, layout, 0, 1, 1) if piece.param == "output_layer.weight"]
    assert (copy.hf_name, copy.role) == ("model.embed_tokens.weight", "tied_copy")
    assert not any(piece.param == "output_layer.weight" for piece in chunk_pieces(shape, ParallelLayout(4), 0, 0, 0))
    plan = build_plan(shape, layout, dict.fromkeys(expected_hf_tensors(shape), torch.float32))
    exported = [(rank, w.piece.param) for rank, writes in enumerate(plan.writes) for w in writes[0] if "embed" in w.piece.hf_name]
    assert exported == [(0, "embedding.word_embeddings.weight")]


@pytest.mark.parametrize(
    "shape, degrees, message",
    [
        (make_shape(), {"tp": 3}, "tp=3 does not fit num_attention_heads=4 and num_key_value_heads=2; use 1, 2 or 4$"),
        (make_shape(heads=8, kv_heads=8), {"tp": 8}, "tp=8 does not fit intermediate_size=12; use 1, 2 or 4$"),
        (make_shape(heads=12, kv_heads=2), {"tp": 3}, "tp=3 does not fit num_key_value_heads=2; use 1, 2 or 4$"),
        (make_shape(heads=12, kv_heads=1, head_dim=5), {"tp": 4}, "tp=4 does not fit head_dim=5; use 1 or 2$"),
        (make_shape(heads=5, kv_heads=2), {}, "num_attention_heads=5 is not a multiple of num_key_value_heads=2"),
        (make_shape(layers=8), {}, "a layout of 4 layers; the model has 8"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_values_that_do(
    shape: ModelShape, degrees: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        chunk_pieces(shape, ParallelLayout(4, **degrees), 0, 0, 0)


def owners(shape: ModelShape, layout: ParallelLayout) -> list[Piece]:
    ranks = [(t, s, c) for t in range(layout.tp) for s in range(layout.pp) for c in range(layout.vpp)]
    return [piece for rank in ranks for piece in chunk_pieces(shape, layout, *rank) if piece.role == "owner"]


def test_publishing_local_layer_numbers_would_not_cover_the_model() -> None:
    shape, layout = make_shape(layers=4), ParallelLayout(4, pp=2)
    expected = expected_hf_tensors(shape)
    good = owners(shape, layout)
    check_coverage(expected, good)
    naive = [replace(p, hf_name=p.hf_name.replace("layers.2.", "layers.0.").replace("layers.3.", "layers.1.")) for p in good]
    with pytest.raises(RunFailed, match=r"layers\.0\..* is double.*"):
        check_coverage(expected, naive)


class RankMajorLayout(ParallelLayout):
    """The naive numbering: a stage's chunks follow one another."""

    def layers(self, stage: int, chunk: int = 0) -> range:
        per_chunk = self.num_layers // self.pp // self.vpp
        return range((stage * self.vpp + chunk) * per_chunk, (stage * self.vpp + chunk + 1) * per_chunk)


def test_rank_major_chunks_cover_the_model_and_are_wrong_all_the_same() -> None:
    shape, hf = make_shape(layers=4), stamped_hf(make_shape(layers=4))
    true, naive = ParallelLayout(4, pp=2, vpp=2), RankMajorLayout(4, pp=2, vpp=2)
    merged = {name: torch.zeros_like(tensor) for name, tensor in hf.items()}
    for stage in range(2):
        for chunk in range(2):
            params = chunk_params(shape, true, 0, stage, chunk, hf)
            for piece in chunk_pieces(shape, naive, 0, stage, chunk):
                piece.hf(merged[piece.hf_name]).copy_(piece.local(params[piece.param]))
    check_coverage(expected_hf_tensors(shape), owners(shape, naive))
    wrong = {name.split(".")[2] for name in hf if not torch.equal(merged[name], hf[name])}
    assert wrong == {"1", "2"}  # layers 1 and 2 changed places


@pytest.mark.parametrize(
    "change, fault",
    [
        (lambda pieces: pieces[1:], "x: 0 to 2 is missing"),
        (lambda pieces: pieces[:1], "x: 2 to 4 is missing"),
        (lambda pieces: [*pieces, pieces[0]], "x: 0 to 2 is double"),
        (lambda pieces: [pieces[0], replace(pieces[1], start=3)], "x: 2 to 3 is missing"),
        (lambda pieces: [*pieces, replace(pieces[0], hf_name="y")], "y is not a tensor of the model"),
        (lambda pieces: [pieces[0], replace(pieces[1], hf_shape=(5, 1))], r"x has shape \(4, 1\), a piece says \(5, 1\)"),
        (lambda pieces: [pieces[0], replace(pieces[1], dim=1)], "cut along several dimensions"),
    ],
)
def test_a_plan_with_a_gap_or_an_overlap_is_refused(change: Any, fault: str) -> None:
    pieces = [Piece("p", (2, 1), "x", (4, 1), 0, start, start + 2, 0, 0, 2) for start in (0, 2)]
    check_coverage({"x": (4, 1)}, pieces)
    with pytest.raises(RunFailed, match=fault):
        check_coverage({"x": (4, 1)}, change(pieces))


def test_replicas_share_the_writing_evenly() -> None:
    shape, layout = make_shape(layers=8), ParallelLayout(8, pp=2, dp=2)
    plan = build_plan(shape, layout, dict.fromkeys(expected_hf_tensors(shape), torch.float32), num_writers=2)
    loads = [sum(write.num_elements for write in writes[0]) for writes in plan.writes]
    for stage in range(2):
        first, second = (loads[layout.rank_of(dp=dp, pp=stage)] for dp in range(2))
        assert abs(first - second) < 0.1 * (first + second)


def test_the_formulas_of_the_bytes() -> None:
    shape = make_shape(layers=4, kv_heads=4, vocab=64)
    layout = ParallelLayout(4, tp=2, pp=2)
    dtypes = dict.fromkeys(expected_hf_tensors(shape), torch.bfloat16)
    model = 2 * shape.num_parameters
    full = build_plan(shape, layout, dtypes)
    assert (full.model_bytes, full.formula_bytes) == (model, model * 3 / 4)
    norms = 2 * (2 * 4 + 1) * 8  # replicated tensors count once for each tp rank
    assert build_plan(shape, layout, dtypes, gather="pp").formula_bytes == (model + norms) * 1 / 4
