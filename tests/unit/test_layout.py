"""Rank arithmetic and layer tables, against literal tables."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megappo.errors import UserError
from megappo.parallel_state.layout import ParallelLayout


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


def test_thirty_layers_on_four_stages_need_a_given_split() -> None:
    with pytest.raises(UserError) as error:
        ParallelLayout(num_layers=30, pp=4)
    assert str(error.value) == (
        "actor.parallel.pp=4 does not divide num_layers=30; use 1, 2, 3, 5, 6, 10, 15 or 30, "
        "or give actor.parallel.layers_per_stage"
    )
    split = ParallelLayout(num_layers=30, pp=4, layers_per_stage=(8, 8, 7, 7))
    assert sorted(layer for stage in table(split) for chunk in stage for layer in chunk) == list(range(30))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_layers": 8, "pp": 2, "vpp": 3}, "actor.parallel.vpp=3 does not divide the 4 layers of each stage"),
        ({"num_layers": 8, "vpp": 2}, "needs pipeline stages"),
        ({"num_layers": 8, "pp": 2, "layers_per_stage": (5, 2)}, "sum to num_layers=8 (they sum to 7)"),
        ({"num_layers": 8, "pp": 2, "layers_per_stage": (8,)}, "pp=2 needs 2"),
        ({"num_layers": 8, "pp": 2, "vpp": 2, "layers_per_stage": (5, 3)}, "layers_per_stage[0]=5 is not a multiple"),
        ({"num_layers": 8, "tp": 0}, "actor.parallel.tp=0 must be at least 1"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_key(arguments: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=None) as error:
        ParallelLayout(**arguments)  # type: ignore[arg-type]
    assert says in str(error.value)


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


def test_layout_and_families_import_no_torch() -> None:
    code = "import sys, megappo.parallel_state.layout, megappo.models.families; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
