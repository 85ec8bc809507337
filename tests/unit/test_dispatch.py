"""Which rows go to which rank, and whose results come back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.controller.dispatch import Dispatch, check_world, collectors, dispatch_mode, dispatched, rows_of_ranks, split_rows
from megappo.controller.worker import join_rows, num_rows
from megappo.errors import UserError
from megappo.parallel_state.layout import ParallelLayout


def test_seven_rows_over_three_dp_ranks():
    assert split_rows(7, 3) == [slice(0, 3), slice(3, 5), slice(5, 7)]


def test_two_rows_over_four_dp_ranks_leave_two_without_rows():
    assert split_rows(2, 4) == [slice(0, 1), slice(1, 2), slice(2, 2), slice(2, 2)]


@given(rows=st.integers(0, 200), dp=st.integers(1, 17))
def test_slices_cover_all_rows_in_order_and_differ_by_at_most_one(rows, dp):
    slices = split_rows(rows, dp)
    assert len(slices) == dp
    assert [row for s in slices for row in range(rows)[s]] == list(range(rows))
    sizes = [s.stop - s.start for s in slices]
    assert max(sizes) - min(sizes) <= 1


def test_all_ranks_of_a_dp_rank_get_its_rows_and_the_last_stages_tp_0_answers():
    layout = ParallelLayout(num_layers=4, tp=2, pp=2, dp=2)
    # Megatron's order: rank = tp + 2 * (dp + 2 * pp)
    first, second = slice(0, 3), slice(3, 5)
    assert rows_of_ranks(layout, 5) == [first, first, second, second, first, first, second, second]
    assert collectors(layout) == [4, 6]


def test_with_context_parallel_only_cp_0_answers():
    assert collectors(ParallelLayout(num_layers=2, tp=2, cp=2, dp=2)) == [0, 4]


@given(rows=st.integers(0, 40), tp=st.integers(1, 3), cp=st.integers(1, 2), pp=st.integers(1, 3), dp=st.integers(1, 5))
def test_what_the_collectors_return_stands_in_the_batchs_order(rows, tp, cp, pp, dp):
    layout = ParallelLayout(num_layers=6, tp=tp, cp=cp, pp=pp, dp=dp)
    ids = torch.arange(rows)
    by_rank = [ids[s] for s in rows_of_ranks(layout, rows)]
    joined = join_rows([{"sample_ids": by_rank[rank]} for rank in collectors(layout)], "test")
    assert torch.equal(joined["sample_ids"], ids)


def test_ranks_that_return_different_names_are_an_error():
    with pytest.raises(ValueError, match=r"one data-parallel rank returned \['values'\], another \['entropy'\]"):
        join_rows([{"values": torch.zeros(1)}, {"entropy": torch.zeros(1)}], "actor.values")


def test_a_batch_of_unequal_rows_is_refused():
    with pytest.raises(ValueError, match="'scores': 3"):
        num_rows({"input_ids": torch.zeros(2, 5), "scores": torch.zeros(3)})


def test_a_decorated_method_tells_its_mode():
    @dispatched(Dispatch.DP)
    def update():
        return 1

    assert dispatch_mode(update) is Dispatch.DP
    assert dispatch_mode(print) is None
    assert update() == 1


def test_a_layout_that_does_not_fill_the_world_is_refused_with_its_product():
    layout = ParallelLayout(num_layers=4, tp=2, pp=2, key="critic.parallel")
    check_world(layout, 4)
    with pytest.raises(UserError) as refused:
        check_world(layout, 6)
    assert "critic.parallel.tp=2" in str(refused.value)
    assert "= 4 ranks, but the world has 6" in str(refused.value)
