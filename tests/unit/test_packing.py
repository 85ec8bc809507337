"""Micro-batches by token budget: none above it, as many on every rank, and everything back in its place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megappo.controller.dispatch import split_rows
from megappo.data import packing
from megappo.data.balance import imbalance
from megappo.data.packing import BatchPlan, groups_by_number, micro_batches, pack_by_tokens, plan_batch


def first_fit_decreasing(lengths, budget):
    """The textbook's loop."""
    room = []
    for length in sorted(lengths, reverse=True):
        fits = next((g for g, free in enumerate(room) if free >= length), None)
        if fits is None:
            room.append(budget - length)
        else:
            room[fits] -= length
    return len(room)


def test_eight_samples_of_seven_tokens_at_a_budget_of_eight_make_eight_groups():
    """ceil(56 / 8) = 7 would not do."""
    assert pack_by_tokens([7] * 8, 8) == [[i] for i in range(8)]


def test_a_sample_above_the_budget_is_an_error_that_names_the_key():
    with pytest.raises(ValueError, match=r"a sample of 9 tokens is above micro_batch_tokens=8; raise it to 9 or more"):
        pack_by_tokens([7, 9, 1], 8)


def test_a_packing_that_first_fit_misses_is_found():
    """First-fit decreasing makes 5 4 | 3 3 3 | 2 of what fits in two groups of 10."""
    lengths = [5, 4, 3, 3, 3, 2]
    assert first_fit_decreasing(lengths, 10) == 3
    assert sorted(pack_by_tokens(lengths, 10)) == [[0, 2, 5], [1, 3, 4]]


@given(st.lists(st.integers(0, 60), max_size=60), st.integers(60, 150))
@example([], 60)
@example([0, 0], 60)
@settings(max_examples=300, deadline=None)
def test_groups_cover_each_sample_once_keep_the_budget_and_are_at_most_first_fits(lengths, budget):
    groups = pack_by_tokens(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(group and sum(lengths[i] for i in group) <= budget for group in groups)
    assert len(groups) <= first_fit_decreasing(lengths, budget)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=200), st.integers(60, 150))
@settings(max_examples=100, deadline=None)
def test_many_samples_are_packed_by_first_fit_alone(lengths, budget):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "FULLEST_ITEMS", 0)
        assert len(pack_by_tokens(lengths, budget)) == first_fit_decreasing(lengths, budget)


@pytest.mark.parametrize("budget, lengths, message", [(0, [1], "token budget of 0"), (4, [1, -1], "sample 1 has -1 tokens")])
def test_impossible_budgets_and_lengths_are_refused(budget, lengths, message):
    with pytest.raises(ValueError, match=message):
        pack_by_tokens(lengths, budget)


@given(
    tokens=st.lists(st.integers(1, 50), max_size=50),
    budget=st.integers(50, 120),
    more=st.integers(0, 5),
    quadratic=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_exactly_as_many_micro_batches_as_asked_for(tokens, budget, more, quadratic):
    count = max(1, len(pack_by_tokens(tokens, budget)) + more)
    groups = micro_batches(tokens, budget, count, [t * t for t in tokens] if quadratic else None)
    assert len(groups) == count
    assert sorted(i for group in groups for i in group) == list(range(len(tokens)))
    assert all(sum(tokens[i] for i in group) <= budget for group in groups)
    assert sum(not group for group in groups) == max(0, count - len(tokens))


def test_too_few_micro_batches_are_refused():
    with pytest.raises(ValueError, match="8 samples need 8 micro-batches of 8 tokens, not 7"):
        micro_batches([7] * 8, 8, 7)


def test_a_budget_that_equal_costs_would_break_is_kept():
    """By cost alone the sample of cost 100 would be alone and the other three together, which is 90 tokens."""
    tokens, costs = [30, 30, 30, 30], [100, 10, 10, 10]
    assert sorted(micro_batches(tokens, 90, 2, costs)) == [[0], [1, 2, 3]]
    groups = micro_batches(tokens, 60, 2, costs)
    assert sorted(map(len, groups)) == [2, 2]


def check(plan: BatchPlan, lengths, dp, multiple, budget=None, size=None):
    groups = plan.groups()
    assert len(groups) == dp
    assert all(len(rank) == plan.num_micro_batches for rank in groups)
    assert plan.num_micro_batches % multiple == 0 and plan.num_micro_batches > 0
    flat = [i for rank in groups for group in rank for i in group]
    assert sorted(flat) == list(range(len(lengths)))
    for rank, samples in zip(groups, plan.ranks(), strict=True):
        assert sorted(i for group in rank for i in group) == sorted(samples)
        for group in rank:
            assert budget is None or sum(lengths[i] for i in group) <= budget
            assert size is None or len(group) <= size
    # The rows of a batch in plan.order that the dispatch gives to a rank are the rank's.
    assert plan.rank_rows == [s.stop - s.start for s in split_rows(len(lengths), dp)]
    assert [plan.order[s] for s in split_rows(len(lengths), dp)] == plan.ranks()


@given(
    lengths=st.lists(st.integers(1, 100), max_size=60),
    dp=st.integers(1, 5),
    multiple=st.sampled_from([1, 2, 4]),
    budget=st.none() | st.integers(100, 300),
    size=st.integers(1, 6),
)
@settings(max_examples=300, deadline=None)
def test_all_ranks_get_as_many_micro_batches_within_the_budget(lengths, dp, multiple, budget, size):
    if budget is not None:
        check(plan_batch(lengths, dp, budget=budget, multiple=multiple), lengths, dp, multiple, budget=budget)
    else:
        check(plan_batch(lengths, dp, size=size, multiple=multiple), lengths, dp, multiple, size=size)


def test_five_long_samples_and_five_short_ones_over_two_ranks():
    """Split as they come, one rank would need five micro-batches and the other one."""
    lengths = [95] * 5 + [20] * 5
    plan = plan_batch(lengths, 2, budget=100)
    check(plan, lengths, 2, 1, budget=100)
    assert plan.num_micro_batches == 4  # three long ones on one rank, two and three short ones behind
    assert plan.describe(lengths)["dp_imbalance"] < 0.17


def test_one_short_sample_against_nine_long_ones():
    lengths = [3] + [100] * 9
    plan = plan_batch(lengths, 2, budget=100, multiple=2)
    check(plan, lengths, 2, 2, budget=100)
    assert plan.num_micro_batches == 6


def test_fewer_samples_than_ranks_leave_ranks_with_micro_batches_of_nothing():
    plan = plan_batch([10, 20], 4, budget=50, multiple=2)
    check(plan, [10, 20], 4, 2, budget=50)
    assert [sum(map(len, rank)) for rank in plan.groups()] == [1, 1, 0, 0]
    assert plan.num_micro_batches == 2
    nothing = plan_batch([], 2, budget=50, multiple=3)
    assert nothing.groups() == [[[], [], []], [[], [], []]]


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("count", range(1, 13))
def test_an_interleaved_schedule_gets_a_multiple_of_its_stages(pp, count):
    """Megatron's rule for M micro-batches in groups of N = pp: N <= M, and M mod N is 0 or at least pp."""
    plan = plan_batch([60] * count, budget=100, multiple=pp)
    m = plan.num_micro_batches
    assert pp <= m and (m % pp == 0 or m % pp >= pp)
    assert m < count + pp  # no more than rounding up asks for


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=40), dp=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_results_come_back_in_the_batchs_own_order(lengths, dp, seed):
    """Each rank runs its micro-batches and gives its rows in its own order; the index puts all of them back."""
    plan = plan_batch(lengths, dp, budget=100)
    ids = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))
    sent = ids[torch.tensor(plan.order)]
    numbers = torch.tensor(plan.micro_batch)
    results = []
    for rows in split_rows(len(lengths), dp):
        mine, found = sent[rows], torch.full((rows.stop - rows.start,), -1)
        for group in groups_by_number(numbers[rows].tolist(), plan.num_micro_batches):
            found[group] = mine[group]
        results.append(found)
    assert torch.equal(torch.cat(results)[torch.tensor(plan.restore)], ids)


def test_a_cost_of_its_own_is_what_is_balanced():
    lengths = np.random.default_rng(0).lognormal(5, 1, 64).astype(int).clip(1, 4000)
    squares = lengths.astype(float) ** 2
    by_tokens, by_squares = (plan_batch(lengths, 4, budget=4096, costs=costs) for costs in (None, squares))
    assert imbalance(squares, by_squares.ranks()) < 0.5 * imbalance(squares, by_tokens.ranks())
    check(by_squares, lengths.tolist(), 4, 1, budget=4096)


def test_forward_calls_and_padding_of_a_fixed_list():
    """16 samples: a larger budget of their own halves the forward-only passes' calls; packing has no padding to speak of."""
    lengths = [50, 100, 150, 200] * 4
    train, score = (plan_batch(lengths, budget=budget) for budget in (500, 1000))
    assert (train.num_micro_batches, score.num_micro_batches) == (4, 2)
    assert train.describe(lengths)["micro_batch_imbalance"] == 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "budget=None and size=None"),
        ({"budget": 5, "size": 1}, "budget=5 and size=1"),
        ({"size": 0}, "size=0 must be 1 or more"),
        ({"size": 1, "dp": 0}, "dp=0"),
        ({"size": 1, "multiple": 0}, "multiple=0"),
        ({"size": 1, "costs": [1.0]}, "1 costs for 2 samples"),
        ({"budget": 1}, "a sample of 2 tokens is above micro_batch_tokens=1"),
    ],
)
def test_impossible_plans_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plan_batch([1, 2], **options)
