"""Does one rank's `WeightManager` publish what the parameters hold now, only when it may, and notice when they move?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megappo.errors import RunFailed
from megappo.models.shape import ModelShape
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.buffer import TensorMeta
from megappo.pp_weights.manager import WeightManager, hf_dtypes
from megappo.pp_weights.verify import NamesDiffer, verify
from tests.fake_chunks import FakeChunk, chunk_params, make_shape, rank_chunks, stamped_hf

SHAPE = make_shape()
LAYOUT = ParallelLayout(4)


@dataclass
class OneRank:
    layout: ParallelLayout = LAYOUT
    rank: int = 0
    tp_group: Any = None
    pp_group: Any = None


def manager_of(chunks: list[FakeChunk], shape: ModelShape = SHAPE, **options: Any) -> WeightManager:
    return WeightManager(chunks, shape, OneRank(), **{"is_active": lambda: True, **options})


def published(manager: WeightManager, version: int = 1, verify: bool = False) -> dict[str, torch.Tensor]:
    buffer = manager.publish(version, verify)
    assert buffer is not None and buffer.manifest.weight_version == version
    return {name: view.clone() for name, view in buffer.views().items()}


def assert_same(views: dict[str, torch.Tensor], hf: dict[str, torch.Tensor]) -> None:
    assert set(views) == set(hf)
    assert [name for name in hf if not torch.equal(views[name], hf[name])] == []


@pytest.mark.parametrize("transport", ["auto", "shared_memory", "collective"])
@pytest.mark.parametrize("gather", ["full", "pp"])
@pytest.mark.parametrize("shape", [SHAPE, make_shape(tied=True), make_shape(head="value")])
def test_one_rank_publishes_the_whole_model(transport: Any, gather: Any, shape: ModelShape) -> None:
    hf = stamped_hf(shape)
    manager = manager_of(rank_chunks(shape, LAYOUT, 0, hf), shape, transport=transport, gather=gather)
    assert_same(published(manager), hf)
    assert manager.stats is not None and manager.stats.received_bytes == 0 == manager.stats.formula_bytes
    assert manager.stats.copied_bytes == 4 * shape.num_parameters
    manager.close()
    manager.close()


def test_the_next_version_holds_the_new_values_and_new_checksums() -> None:
    hf = stamped_hf(SHAPE)
    chunks = rank_chunks(SHAPE, LAYOUT, 0, hf)
    manager = manager_of(chunks)
    first = manager.publish(1, verify=True)
    assert first is not None
    old = first.manifest
    verify(old, first.views())
    for param in chunks[0].parameters():
        param.add_(1)
    second = manager.publish(2, verify=True)
    assert second is first
    verify(second.manifest, second.views())
    assert_same(second.views(), {name: tensor + 1 for name, tensor in hf.items()})
    with pytest.raises(RunFailed, match="version 1: bytes differ"):
        verify(old, second.views())
    third = manager.publish(3)
    assert third is not None and {entry.checksum for entry in third.manifest.entries} == {None}


def test_the_published_memory_is_not_the_parameters() -> None:
    hf = stamped_hf(SHAPE)
    chunks = rank_chunks(SHAPE, LAYOUT, 0, hf)
    buffer = manager_of(chunks).publish(1)
    for param in chunks[0].parameters():
        param.zero_()
    assert buffer is not None
    assert_same(buffer.views(), hf)


def test_publishing_is_refused_while_another_model_is_active() -> None:
    active = {"model": "reference"}
    manager = manager_of(rank_chunks(SHAPE, LAYOUT, 0, stamped_hf(SHAPE)), is_active=lambda: active["model"] == "actor")
    with pytest.raises(RunFailed, match="not the one to publish"):
        manager.publish(1)
    active["model"] = "actor"
    assert_same(published(manager), stamped_hf(SHAPE))


@pytest.mark.parametrize("way", ["data", "parameter", "set_"])
def test_five_syncs_with_replaced_storages_publish_the_new_values_each_time(way: str) -> None:
    hf = stamped_hf(SHAPE)
    chunks = rank_chunks(SHAPE, LAYOUT, 0, hf)
    manager = manager_of(chunks)
    published(manager)
    for step in range(1, 6):
        for module in chunks[0].modules():
            for name, param in list(module._parameters.items()):
                assert param is not None
                fresh = param.detach() + 1
                if way == "data":
                    param.data = fresh
                elif way == "parameter":
                    module._parameters[name] = torch.nn.Parameter(fresh)
                else:
                    with torch.no_grad():
                        param.set_(fresh)
        assert_same(published(manager, step), {name: tensor + step for name, tensor in hf.items()})


def test_off_loaded_parameters_are_refused_and_may_come_back() -> None:
    hf = stamped_hf(SHAPE)
    chunks = rank_chunks(SHAPE, LAYOUT, 0, hf)
    manager = manager_of(chunks)
    published(manager)
    param = chunks[0].get_parameter("decoder.layers.2.mlp.linear_fc2.weight")
    kept = param.detach().clone()
    size = param.untyped_storage().size()
    param.untyped_storage().resize_(0)
    with pytest.raises(RunFailed, match=r"decoder\.layers\.2\.mlp\.linear_fc2\.weight is off-loaded"):
        manager.publish(2)
    param.untyped_storage().resize_(size)
    with torch.no_grad():
        param.copy_(kept)
    assert_same(published(manager, 3), hf)


def test_a_parameter_that_changed_its_shape_is_refused() -> None:
    chunks = rank_chunks(SHAPE, LAYOUT, 0, stamped_hf(SHAPE))
    manager = manager_of(chunks)
    chunks[0].get_parameter("decoder.final_layernorm.weight").data = torch.ones(9)
    with pytest.raises(RunFailed, match=r"final_layernorm\.weight has shape \(9,\) now; it had \(8,\)"):
        manager.publish(1)


def test_transposed_strided_and_expanded_parameters_are_published_as_their_values() -> None:
    hf = stamped_hf(SHAPE)
    params = chunk_params(SHAPE, LAYOUT, 0, 0, 0, hf)
    for name, tensor in params.items():
        if "norm" in name:
            wide = torch.stack([tensor, torch.zeros_like(tensor)], dim=1)
            params[name] = wide[:, 0]
        else:
            params[name] = tensor.t().contiguous().t()
            assert not params[name].is_contiguous()
    hf["model.norm.weight"] = torch.full((8,), 5.0)
    params["decoder.final_layernorm.weight"] = torch.tensor([5.0]).expand(8)
    for transport in ("shared_memory", "collective"):
        assert_same(published(manager_of([FakeChunk(params)], transport=transport)), hf)


@pytest.mark.parametrize("transport", ["shared_memory", "collective"])
def test_mixed_dtypes_keep_theirs(transport: str) -> None:
    dtypes = {"norm": torch.float32, "proj": torch.bfloat16, "embed": torch.int8, "lm_head": torch.float64}
    hf = {name: t.remainder(100).to(next(d for k, d in dtypes.items() if k in name)) for name, t in stamped_hf(SHAPE).items()}
    views = published(manager_of(rank_chunks(SHAPE, LAYOUT, 0, hf), transport=transport), verify=True)
    assert_same(views, hf)
    assert {view.dtype for view in views.values()} == set(dtypes.values())


def test_every_tensor_starts_at_the_configured_alignment() -> None:
    manager = manager_of(rank_chunks(SHAPE, LAYOUT, 0, stamped_hf(SHAPE)), alignment_bytes=512)
    buffer = manager.publish(1)
    assert buffer is not None
    assert {view.data_ptr() % 512 for view in buffer.views().values()} == {0}


def metas(shape: ModelShape, layout: ParallelLayout) -> list[list[dict[str, TensorMeta]]]:
    hf = stamped_hf(shape)
    return [
        [
            {n: TensorMeta(tuple(t.shape), t.dtype) for n, t in chunk_params(shape, layout, own.tp, own.pp, chunk, hf).items()}
            for chunk in range(layout.vpp)
        ]
        for own in map(layout.coordinates, range(layout.world_size))
    ]


def test_ranks_that_do_not_hold_the_model_are_refused_at_set_up() -> None:
    shape, layout = make_shape(layers=4), ParallelLayout(4, tp=2, pp=2, dp=2)
    good = metas(shape, layout)
    assert set(hf_dtypes(good, shape, layout).values()) == {torch.float32}

    bad = metas(shape, layout)
    del bad[6][0]["decoder.layers.1.mlp.linear_fc1.weight"]  # dp 1 of the last stage: its layers are 2 and 3
    with pytest.raises(NamesDiffer, match=r"parameters of ranks \[2, 6\]: missing: decoder\.layers\.3\.mlp\.linear_fc1\.weight"):
        hf_dtypes(bad, shape, layout)

    bad = metas(shape, layout)
    bad[1][0]["decoder.layers.0.mlp.linear_fc2.weight"] = TensorMeta((8, 12), torch.float32)  # not cut over tp
    with pytest.raises(NamesDiffer, match=r"linear_fc2\.weight \(8, 12\), expected \(8, 6\)"):
        hf_dtypes(bad, shape, layout)

    bad = metas(shape, layout)
    name = "decoder.final_layernorm.weight"
    bad[5][0][name] = bad[5][0][name]._replace(dtype=torch.bfloat16)
    with pytest.raises(
        RunFailed, match=r"model\.norm\.weight is torch\.float32 on one rank and torch\.bfloat16 on ranks \[1, 5\]"
    ):
        hf_dtypes(bad, shape, layout)


def test_a_model_of_another_shape_is_refused() -> None:
    chunks = rank_chunks(SHAPE, LAYOUT, 0, stamped_hf(SHAPE))
    with pytest.raises(NamesDiffer, match=r"misshapen: decoder\.layers\.0\.mlp\.linear_fc1\.weight"):
        manager_of(chunks, replace(SHAPE, ffn_size=16))
