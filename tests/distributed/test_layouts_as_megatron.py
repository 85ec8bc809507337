"""Do our layer tables equal those that megatron computes from the same keys, and refuse what it refuses? One process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megappo.errors import UserError
from megappo.models.gpt import megatron_layout
from megappo.parallel_state.layout import ParallelLayout

pytestmark = pytest.mark.distributed

Table = list[list[list[int]]]
"""[stage][chunk] -> layer numbers"""
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


def ours(**arguments: Any) -> Table | None:
    try:
        layout = ParallelLayout(**arguments)
    except UserError:
        return None
    return [[list(layout.layers(stage, chunk)) for chunk in range(layout.vpp)] for stage in range(layout.pp)]


def megatrons(num_layers: int, pp: int, vpp: int, **keys: Any) -> Table | None:
    """By megatron's own checks, counts and offsets; None where it refuses, or where counts below 0 come out (of 1 layer 2 on the
    first of 2 stages and -1 on the last)."""
    try:
        config = TransformerConfig(
            num_layers=num_layers,
            hidden_size=8,
            num_attention_heads=1,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
            pipeline_dtype=torch.float32,
            **keys,
        )
        table = []
        for stage in range(pp):
            row = []
            for chunk in range(vpp):
                at = chunk if vpp > 1 else None
                first = get_transformer_layer_offset(config, at, stage)
                row.append(list(range(first, first + get_num_layers_to_build(config, at, stage))))
            table.append(row)
    except (ValueError, AssertionError):
        return None
    in_order = [layer for chunk in zip(*table, strict=True) for layers in chunk for layer in layers]
    return table if in_order == list(range(num_layers)) else None


@pytest.mark.parametrize(
    "keys",
    [
        *({FIRST: first} for first in (1, 2, 3, 4, 6)),
        *({LAST: last} for last in (0, 1, 2, 3, 4, 6)),
        *({FIRST: first, LAST: last} for first, last in itertools.product((1, 2, 4), (1, 2, 3, 4))),
        {EMBEDDING: True},
        {LOSS: True},
        {EMBEDDING: True, LOSS: True},
        {},
        {FIRST: 2, LOSS: True},
    ],
    ids=str,
)
def test_the_table_is_megatrons_own(keys: dict[str, Any]) -> None:
    fitting = 0
    for num_layers, pp, vpp in itertools.product(range(1, 21), (2, 3, 4, 5), (1, 2, 3)):
        if pp == 2 and vpp > 1 and keys.keys() == {FIRST, LAST}:
            continue  # no stage in between, and megatron divides by their number: see the test below
        got = ours(num_layers=num_layers, pp=pp, vpp=vpp, **keys)
        assert got == megatrons(num_layers, pp, vpp, **keys), (num_layers, pp, vpp)
        fitting += got is not None
    assert fitting >= 3 or keys in ({FIRST: 2, LOSS: True}, {LAST: 0})


def test_the_golden_table_of_an_uneven_last_stage_is_megatrons_too() -> None:
    assert megatrons(10, 3, 2, num_layers_in_last_pipeline_stage=2) == [[[0, 1], [5, 6]], [[2, 3], [7, 8]], [[4], [9]]]


def test_both_ends_pinned_on_two_stages_of_several_chunks_is_where_megatron_fails_and_we_do_not() -> None:
    keys = {FIRST: 4, LAST: 2}
    with pytest.raises(ZeroDivisionError):
        megatrons(6, 2, 2, **keys)
    assert ours(num_layers=6, pp=2, vpp=2, **keys) == [[[0, 1], [3, 4]], [[2], [5]]]


def by_layout_class(layout: Any, pp: int, vpp: int) -> Table:
    return [
        [layout.get_layer_id_list(LayerType.decoder, chunk if vpp > 1 else None, stage) for chunk in range(vpp)]
        for stage in range(pp)
    ]


TEXTS = [
    (17, 4, 2, "Et*3|(tt|)*6ttL"),
    (4, 2, 2, "E|tt|tt|L"),
    (4, 3, 1, "E|tttt|L"),
    (6, 2, 3, "Ett|t|(t|)*2|tL"),
    (5, 3, 2, "E|tt||(t,t)*1|t*1|,L"),
    (12, 4, 3, "E(t|)*5(tt|)*2|*2ttt||,L"),
    (8, 2, 1, "E(t*2)*2|ttttL"),
]


@pytest.mark.parametrize("num_layers, pp, vpp, text", TEXTS)
def test_a_layout_string_means_what_it_means_to_megatron(
    monkeypatch: pytest.MonkeyPatch, num_layers: int, pp: int, vpp: int, text: str
) -> None:
    monkeypatch.setattr(mpu, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", vpp if vpp > 1 else None)
    theirs = PipelineParallelLayerLayout(text, pp)
    theirs.validate_layer_layout(num_layers, None)
    assert ours(num_layers=num_layers, pp=pp, vpp=vpp, pipeline_model_parallel_layout=text) == by_layout_class(theirs, pp, vpp)


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_layers": 10, "pp": 3, "vpp": 2, LAST: 2},
        {"num_layers": 6, "pp": 4, "vpp": 2, EMBEDDING: True, LOSS: True},
        {"num_layers": 30, "pp": 4, "layers_per_stage": (8, 8, 7, 7)},
        *({"num_layers": n, "pp": pp, "vpp": vpp, "pipeline_model_parallel_layout": text} for n, pp, vpp, text in TEXTS),
    ],
    ids=str,
)
def test_the_table_that_we_pass_on_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]) -> None:
    layout = ParallelLayout(**arguments)
    monkeypatch.setattr(mpu, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", layout.vpp if layout.vpp > 1 else None)
    theirs = PipelineParallelLayerLayout(megatron_layout(layout), layout.pp)
    theirs.validate_layer_layout(layout.num_layers, None)
    assert by_layout_class(theirs, layout.pp, layout.vpp) == ours(**arguments)
