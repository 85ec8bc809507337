"""Does the plan bring every byte of every tensor to its place, once, for any layout, shape and bucket size?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.errors import UserError
from megappo.models.families import rules_of
from megappo.models.shape import ModelShape
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.assemble import Assembler
from megappo.pp_weights.buffer import views_of
from megappo.pp_weights.mapping import expected_hf_tensors
from megappo.pp_weights.plan import TransferPlan, build_plan, model_order
from megappo.pp_weights.update import Update
from tests.fake_chunks import chunk_params, make_shape, stamped_hf


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelShape, ParallelLayout]:
    tp = draw(st.sampled_from([1, 2, 4]))
    pp = draw(st.integers(1, 3))
    vpp = draw(st.integers(1, 2)) if pp > 1 else 1
    layers = pp * vpp * draw(st.integers(1, 2))
    kv = draw(st.sampled_from([1, 2, 4]))
    shape = make_shape(layers, heads=4, kv_heads=kv, vocab=draw(st.integers(1, 200)), tied=draw(st.booleans()))
    return shape, ParallelLayout(layers, tp=tp, pp=pp, vpp=vpp, dp=draw(st.integers(1, 2)))


def brought(plan: TransferPlan, shape: ModelShape, hf: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """What each target's reader gets when every rank makes its writes; untouched bytes are 0xAB."""
    layout = plan.layout
    found = []
    for index, target in enumerate(plan.targets):
        update = Update(1, plan.table, plan.fingerprint, plan.num_buckets, shards=len(plan.targets))
        assembler, tensors = Assembler(update), {}
        for number, manifest in enumerate(target.buckets):
            data = torch.full((manifest.total_bytes,), 0xAB, dtype=torch.uint8)
            views = views_of(data, manifest)
            for rank, writes in enumerate(plan.writes):
                own = layout.coordinates(rank)
                for write in writes[number]:
                    if write.target == index:
                        param = chunk_params(shape, layout, own.tp, own.pp, write.chunk, hf)[write.piece.param]
                        write.piece.hf(views[write.piece.hf_name]).copy_(write.source(param))
            tensors |= {name: t.clone() for name, t in assembler.tensors(manifest.stamped(1), views)}
        assembler.finish()
        found.append(tensors)
    return found


@settings(max_examples=40, deadline=None)
@given(models(), st.none() | st.integers(64, 4000), st.sampled_from([16, 64]), st.booleans(), st.sampled_from(["full", "pp"]))
def test_any_layout_shape_and_bucket_size_brings_every_tensor_whole(
    model: tuple[ModelShape, ParallelLayout], bucket_bytes: int | None, alignment: int, shared: bool, gather: Any
) -> None:
    shape, layout = model
    hf = stamped_hf(shape)
    options: dict[str, Any] = {"bucket_bytes": bucket_bytes, "alignment_bytes": alignment, "gather": gather}
    dtypes = dict.fromkeys(hf, "float32")
    if gather == "pp" and shape.num_kv_heads % layout.tp:
        with pytest.raises(UserError, match=r"must divide num_key_value_heads=\d; use pp_weights.gather=full"):
            build_plan(shape, layout, dtypes, **options)
        return
    plan = build_plan(shape, layout, dtypes, num_writers=layout.dp if shared else 1, **options)
    for target, tensors in zip(plan.targets, brought(plan, shape, hf), strict=True):
        assert tensors.keys() == hf.keys()
        for name, tensor in hf.items():
            assert torch.equal(tensors[name], target.held(name, tensor)), name


def test_tensors_of_one_megatron_module_travel_side_by_side_and_layers_in_order() -> None:
    shape = make_shape(layers=11)
    order = model_order(shape)
    assert sorted(order) == sorted(expected_hf_tensors(shape))
    assert order[0] == "model.embed_tokens.weight"
    assert order[-2:] == ["model.norm.weight", "lm_head.weight"]
    layers = [int(name.split(".")[2]) for name in order if ".layers." in name]
    assert layers == sorted(layers)
    start = order.index("model.layers.10.self_attn.q_proj.weight")
    assert [name.split(".")[4] for name in order[start : start + 3]] == ["q_proj", "k_proj", "v_proj"]
    up = order.index("model.layers.10.mlp.up_proj.weight")
    assert order[up - 1] == "model.layers.10.mlp.gate_proj.weight"
    assert len(rules_of(shape)) == 9


def test_replicas_share_the_bytes_and_the_formulas_are_those_of_the_paper() -> None:
    shape = make_shape(layers=4, kv_heads=4, vocab=128)
    layout = ParallelLayout(4, tp=2, pp=2, dp=2)
    plan = build_plan(shape, layout, dict.fromkeys(stamped_hf(shape), "bfloat16"), num_writers=2)
    sent = [sum(plan.bytes_of(write) for write in writes[0]) for writes in plan.writes]
    assert sum(sent) == plan.model_bytes == 2 * shape.num_parameters
    assert max(sent) < 1.2 * plan.model_bytes / 8
    assert plan.formula_bytes == plan.model_bytes * 3 / 4
    pp = build_plan(shape, layout, dict.fromkeys(stamped_hf(shape), "bfloat16"), gather="pp")
    assert pp.formula_bytes == pp.model_bytes / 4


@pytest.mark.parametrize("bucket_bytes", [1 << 14, 1 << 16, 1 << 20])
def test_five_thousand_small_tensors_travel_in_as_few_buckets_as_can_be(bucket_bytes: int) -> None:
    shape = make_shape(layers=560)
    plan = build_plan(
        shape, ParallelLayout(560, pp=4), dict.fromkeys(expected_hf_tensors(shape), "float32"), bucket_bytes=bucket_bytes
    )
    assert len(plan.table) > 5000
    assert plan.num_buckets <= -(-plan.model_bytes // bucket_bytes) + 1
    assert plan.targets[0].slot_bytes <= bucket_bytes
