"""Rank arithmetic and layer tables, against literal tables."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megappo.errors import UserError
from megappo.parallel_state.layout import ParallelLayout
from megappo.parallel_state.splits import expand_layout


def table(layout: ParallelLayout) -> list[list[list[int]]]:
    """[stage][chunk] -> layer numbers."""
    return [[list(layout.layers(stage, chunk)) for chunk in range(layout.vpp)] for stage in range(layout.pp)]


def test_chunks_are_numbered_chunk_major() -> None:
    assert table(ParallelLayout(num_layers=8, pp=2, vpp=2)) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert table(ParallelLayout(num_layers=16, pp=4, vpp=2)) == [
        [[0, 1], [8, 9]],
        [[2, 3], [10, 11]],
        [[4, 5], [12, 13]],
        [[6, 7], [14, 15]],
    ]
    assert table(ParallelLayout(num_layers=12, pp=2, vpp=3)) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]


def test_an_uneven_split_with_virtual_stages_covers_every_layer_once() -> None:
    layout = ParallelLayout(num_layers=10, pp=3, vpp=2, layers_per_stage=(4, 4, 2))
    assert table(layout) == [[[0, 1], [5, 6]], [[2, 3], [7, 8]], [[4], [9]]]


@pytest.mark.parametrize(
    "split",
    [
        {"layers_per_stage": (4, 4, 2)},
        {"num_layers_in_last_pipeline_stage": 2},
        {"num_layers_in_first_pipeline_stage": 4, "num_layers_in_last_pipeline_stage": 2},
        {"pipeline_model_parallel_layout": "Ett|tt|t|(tt|)*2tL"},
    ],
    ids=str,
)
def test_every_way_of_pinning_the_last_stage_gives_the_same_layout(split: dict[str, Any]) -> None:
    layout = ParallelLayout(num_layers=10, pp=3, vpp=2, **split)
    assert table(layout) == [[[0, 1], [5, 6]], [[2, 3], [7, 8]], [[4], [9]]]
    assert layout.degrees == (1, 3, 2, 1, 1, 1, 2, 2, 2, 2, 1, 1)


def test_the_embedding_and_the_loss_can_count_as_a_layer() -> None:
    both = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    assert table(ParallelLayout(num_layers=30, pp=4, **both)) == [  # trap A3's model
        [list(range(7))], [list(range(7, 15))], [list(range(15, 23))], [list(range(23, 30))],
    ]  # fmt: skip
    assert table(ParallelLayout(num_layers=6, pp=2, vpp=2, **both)) == [[[0], [3, 4]], [[1, 2], [5]]]
    assert table(ParallelLayout(num_layers=7, pp=2, account_for_loss_in_pipeline_split=True)) == [[[0, 1, 2, 3]], [[4, 5, 6]]]
    only_ends = ParallelLayout(num_layers=2, pp=2, vpp=2, **both)
    assert table(only_ends) == [[[], [1]], [[0], []]]
    ends = [(s, c) for s in range(2) for c in range(2) if only_ends.holds_embedding(s, c) or only_ends.holds_head(s, c)]
    assert ends == [(0, 0), (1, 1)]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("Et*3|(tt|)*6ttL", ["Ettt", *["tt"] * 6, "ttL"]),
        ("Ettt|(tt|)*3,m|L", ["Ettt", "tt", "tt", "tt", "m", "L"]),
        ("xy(ab|cd|ef)*2,pq", ["xyab", "cd", "efab", "cd", "efpq"]),
        ("(ab)*3", ["ababab"]),
        ("(|ab)*2,cd", ["", "ab", "abcd"]),
        ("E|*3L", ["E", "", "", "L"]),
        ("E(t*2|)*2L", ["Ett", "tt", "L"]),
    ],
)
def test_megatrons_layout_strings_are_unrolled(text: str, rows: list[str]) -> None:
    assert expand_layout(text) == rows


def test_a_layout_string_is_chunk_major_and_its_chunks_may_be_empty() -> None:
    layout = ParallelLayout(num_layers=17, pp=4, vpp=2, pipeline_model_parallel_layout="Et*3|(tt|)*6ttL")
    assert table(layout)[0] == [[0, 1, 2], [9, 10]]
    assert table(layout)[3] == [[7, 8], [15, 16]]
    assert table(ParallelLayout(4, pp=2, vpp=2, pipeline_model_parallel_layout="E|tttt||L")) == [[[], []], [[0, 1, 2, 3], []]]


def test_layouts_with_other_tables_have_other_degrees() -> None:
    texts = ("Et|tt|t|L", "Ett|t|t|L", "E|ttt|t|L", "Et|t|tt|L")
    layouts = [ParallelLayout(4, pp=2, vpp=2, pipeline_model_parallel_layout=text) for text in texts]
    assert len({layout.degrees for layout in layouts}) == len(texts)
    same = ParallelLayout(4, pp=2, layers_per_stage=(3, 1)), ParallelLayout(4, pp=2, num_layers_in_first_pipeline_stage=3)
    assert same[0].degrees == same[1].degrees


def test_thirty_layers_on_four_stages_need_a_given_split() -> None:
    with pytest.raises(UserError) as error:
        ParallelLayout(num_layers=30, pp=4)
    assert str(error.value) == (
        "actor.parallel.pp=4 does not divide num_layers=30; use 1, 2, 3, 5, 6, 10, 15 or 30, "
        "or give actor.parallel.layers_per_stage"
    )
    split = ParallelLayout(num_layers=30, pp=4, layers_per_stage=(8, 8, 7, 7))
    assert sorted(layer for stage in table(split) for chunk in stage for layer in chunk) == list(range(30))


FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
TEXT = "pipeline_model_parallel_layout"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_layers": 8, "pp": 2, "vpp": 3}, "actor.parallel.vpp=3 does not divide the 4 layers of each stage"),
        ({"num_layers": 8, "vpp": 2}, "needs pipeline stages"),
        ({"num_layers": 8, "pp": 2, "layers_per_stage": (5, 2)}, "sum to num_layers=8 (they sum to 7)"),
        ({"num_layers": 8, "pp": 2, "layers_per_stage": (8, 0)}, "must hold positive counts"),
        ({"num_layers": 8, "pp": 2, "layers_per_stage": (8,)}, "pp=2 needs 2"),
        ({"num_layers": 8, "pp": 2, "layers_per_stage": ()}, "layers_per_stage=[] has 0 entries"),
        (
            {"num_layers": 8, "pp": 2, "vpp": 2, "layers_per_stage": (5, 3)},
            "actor.parallel.layers_per_stage[0]=5 is not a multiple of actor.parallel.vpp=2; use 4 or 6",
        ),
        ({"num_layers": 8, "tp": 0}, "actor.parallel.tp=0 must be at least 1"),
        ({"num_layers": 8, FIRST: 4}, f"actor.parallel.{FIRST}=4 needs pipeline stages: with actor.parallel.pp=1 leave it out"),
        (
            {"num_layers": 10, "pp": 3, "vpp": 2, LAST: 3},
            f"actor.parallel.{LAST}=3: num_layers=10 on actor.parallel.pp=3, vpp=2 does not come out even (the other stages "
            f"share the rest, each stage needs a multiple of vpp); use {LAST}=2 or 6",
        ),
        (
            {"num_layers": 10, "pp": 3, FIRST: 4, LAST: 6},
            f"actor.parallel.{FIRST}=4 and actor.parallel.{LAST}=6: num_layers=10 on actor.parallel.pp=3, vpp=1 does not",
        ),
        ({"num_layers": 10, "pp": 3, FIRST: 4, LAST: 6}, f"use {FIRST}=1, 2 or 3, or {LAST}=1, 2, 3, 4 or 5"),
        ({"num_layers": 8, "pp": 2, FIRST: 0}, f"{FIRST}=0: num_layers=8 on actor"),
        ({"num_layers": 8, "pp": 2, FIRST: 8}, f"use {FIRST}=1, 2, 3, 4, 5, 6 or 7"),
        ({"num_layers": 7, "pp": 2, "vpp": 2, FIRST: 4}, "; use layers_per_stage"),
        (
            {"num_layers": 8, "pp": 4, LOSS: True},
            f"actor.parallel.{LOSS}=true: num_layers=8 and the loss are 9, which actor.parallel.pp=4 x vpp=1 does not divide; "
            f"use 1, 3 or 9 stages, or give actor.parallel.{TEXT}",
        ),
        (
            {"num_layers": 8, "pp": 2, "vpp": 2, EMBEDDING: True, LOSS: True},
            f"actor.parallel.{EMBEDDING}=true and actor.parallel.{LOSS}=true: num_layers=8 and the embedding and the loss are 10",
        ),
        ({"num_layers": 4, "pp": 2, TEXT: "Ett|ttmL"}, "has m (multi-token prediction), which is not supported; leave it out"),
        ({"num_layers": 4, "pp": 2, TEXT: "Ett|t tL"}, f"{TEXT}='Ett|t tL' has ' '; use E, t and L"),
        ({"num_layers": 4, "pp": 2, TEXT: "E(tt|ttL"}, "has '('"),
        ({"num_layers": 4, "pp": 2, TEXT: "Et|t|t|tL"}, "has 4 chunks; actor.parallel.pp=2 x vpp=1 needs 2: set vpp=2"),
        ({"num_layers": 4, "pp": 2, TEXT: "Et|t|ttL"}, "has 3 chunks; actor.parallel.pp=2 x vpp=1 needs 2: write 2"),
        ({"num_layers": 4, TEXT: "Et|tttL"}, "has 2 chunks; actor.parallel.pp=1 x vpp=1 needs 1: write 1"),
        ({"num_layers": 4, "pp": 2, TEXT: "ttE|ttL"}, "must begin with the only E and end with the only L"),
        ({"num_layers": 4, "pp": 2, TEXT: "|EttttL"}, "must begin with the only E"),
        ({"num_layers": 4, "pp": 2, TEXT: "Ett|tt"}, "must begin with the only E and end with the only L"),
        ({"num_layers": 4, "pp": 2, TEXT: "Ett|LttL"}, "must begin with the only E and end with the only L"),
        ({"num_layers": 4, "pp": 2, TEXT: ""}, "has 1 chunks"),
        (
            {"num_layers": 4, "pp": 2, TEXT: "Ett|tL"},
            f"actor.parallel.{TEXT}='Ett|tL' has 3 layers (t); the model has num_layers=4",
        ),
        (
            {"num_layers": 4, "pp": 2, TEXT: "Ett|ttL", "layers_per_stage": (2, 2)},
            f"actor.parallel.layers_per_stage=[2, 2] and actor.parallel.{TEXT}='Ett|ttL' are 2 ways of splitting the same "
            f"layers; keep one of them",
        ),
        ({"num_layers": 4, "pp": 2, FIRST: 2, EMBEDDING: True}, f"{FIRST}=2 and actor.parallel.{EMBEDDING}=true are 2 ways"),
    ],
)
def test_what_does_not_fit_is_refused_with_key_value_and_what_would_do(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as error:
        ParallelLayout(**arguments)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@st.composite
def splits(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a layout, split in any way; the numbers need not fit."""
    pp, vpp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    arguments: dict[str, Any] = {"num_layers": draw(st.integers(1, 24)), "pp": pp, "vpp": vpp if pp > 1 else 1}
    match draw(st.sampled_from(["even", "stages", "ends", "counted", "text"])):
        case "stages":
            counts = [draw(st.integers(1, 3)) * arguments["vpp"] for _ in range(pp)]
            arguments |= {"layers_per_stage": tuple(counts), "num_layers": sum(counts)}
        case "ends":
            arguments |= {key: draw(st.none() | st.integers(1, 8)) for key in (FIRST, LAST)}
        case "counted":
            arguments |= {key: draw(st.booleans()) for key in (EMBEDDING, LOSS)}
        case "text":
            counts = [draw(st.integers(0, 3)) for _ in range(pp * arguments["vpp"])]
            assume(sum(counts))
            arguments |= {TEXT: f"E{'|'.join(f't*{n}' if n else '' for n in counts)}L", "num_layers": sum(counts)}
    return arguments


@given(splits())
def test_every_layer_is_held_exactly_once_in_chunk_major_order(arguments: dict[str, Any]) -> None:
    try:
        layout = ParallelLayout(**arguments)
    except UserError:
        assert "layers_per_stage" not in arguments and TEXT not in arguments
        return
    cells = [(stage, chunk) for chunk in range(layout.vpp) for stage in range(layout.pp)]
    assert [layer for cell in cells for layer in layout.layers(*cell)] == list(range(layout.num_layers))
    assert [cell for cell in cells if layout.holds_embedding(*cell)] == cells[:1]
    assert [cell for cell in cells if layout.holds_head(*cell)] == cells[-1:]
    by_stage = [sum(len(layout.layers(stage, chunk)) for chunk in range(layout.vpp)) for stage in range(layout.pp)]
    assert sum(by_stage) == layout.num_layers
    if "layers_per_stage" in arguments:
        assert tuple(by_stage) == arguments["layers_per_stage"]
    if arguments.get(FIRST):
        assert by_stage[0] == arguments[FIRST]
    if arguments.get(LAST):
        assert by_stage[-1] == arguments[LAST]
    if EMBEDDING in arguments:
        units = [len(layout.layers(*cell)) for cell in cells]
        units[0] += arguments[EMBEDDING]
        units[-1] += arguments[LOSS]
        assert len(set(units)) == 1


def test_tensor_parallel_ranks_are_neighbours_and_stages_are_far_apart() -> None:
    layout = ParallelLayout(num_layers=4, tp=2, pp=2, dp=2)
    assert [(c.tp, c.dp, c.pp) for c in map(layout.coordinates, range(8))] == [
        (0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1),
    ]  # fmt: skip
    assert layout.group_of(3, "pp") == [3, 7]
    assert layout.group_of(3, "tp") == [2, 3]
    assert layout.group_of(3, "dp") == [1, 3]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_coordinates_and_rank_are_inverse(tp: int, cp: int, dp: int, pp: int) -> None:
    layout = ParallelLayout(num_layers=6 * pp, tp=tp, cp=cp, dp=dp, pp=pp)
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        assert layout.rank_of(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank


def test_layouts_families_and_pieces_import_no_torch() -> None:
    modules = ("parallel_state.layout", "models.families", "models.quantised", "pp_weights.mapping", "pp_weights.naming")
    code = f"import sys, {', '.join(f'megappo.{name}' for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
