"""Groups of equal cost: covers, sizes, and never worse than plain differencing, written here anew."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megappo.controller.dispatch import split_rows
from megappo.data import balance
from megappo.data.balance import get_seqlen_balanced_partitions, imbalance, rebalance, sequence_flops


def largest_sum(costs, groups):
    return max(math.fsum(costs[i] for i in group) for group in groups)


def differencing(costs, k, equal_size):
    """The largest sum that plain Karmarkar-Karp reaches; a state is a descending list of sums. Of equal spreads the larger items'
    state comes first; a joined state takes the place of the second."""
    ordered = sorted(costs, reverse=True)
    if equal_size:
        states = dict(enumerate(ordered[i : i + k] for i in range(0, len(ordered), k)))
    else:
        states = {i: [cost] + [0] * (k - 1) for i, cost in enumerate(ordered)}
    while len(states) > 1:
        one, two = sorted(states, key=lambda i: (states[i][-1] - states[i][0], i))[:2]
        states[two] = sorted((a + b for a, b in zip(states.pop(one), reversed(states[two]), strict=True)), reverse=True)
    return states.popitem()[1][0]


def best_possible(costs, k, equal_size):
    """The smallest largest sum there is, by trying all."""
    best = math.inf
    for choice in itertools.product(range(k), repeat=len(costs)):
        sizes = [choice.count(g) for g in range(k)]
        if not equal_size or max(sizes) - min(sizes) <= 1:
            best = min(best, max(sum(c for c, g in zip(costs, choice, strict=True) if g == h) for h in range(k)))
    return best


costs_of_samples = st.lists(st.integers(0, 10_000), max_size=60) | st.lists(st.floats(0, 1e12), max_size=60)


@given(costs=costs_of_samples, k=st.integers(1, 12), equal_size=st.booleans())
@example(costs=[0, 0, 0], k=3, equal_size=False)
@example(costs=[0, 0, 0], k=4, equal_size=False)
@example(costs=[5], k=12, equal_size=True)
@settings(max_examples=300, deadline=None)
def test_each_sample_is_in_one_group_and_no_group_is_empty_that_need_not_be(costs, k, equal_size):
    groups = get_seqlen_balanced_partitions(costs, k, equal_size)
    assert len(groups) == k
    assert sorted(i for group in groups for i in group) == list(range(len(costs)))
    assert all(group == sorted(group) for group in groups)
    assert sum(not group for group in groups) == max(0, k - len(costs))
    if equal_size:
        assert [len(group) for group in groups] == [s.stop - s.start for s in split_rows(len(costs), k)]


@given(costs=st.lists(st.integers(1, 5000), min_size=1, max_size=80), k=st.integers(1, 10), equal_size=st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_largest_group_is_never_above_what_differencing_gives(costs, k, equal_size):
    costs += [1] * (-len(costs) % k)
    ours = largest_sum(costs, get_seqlen_balanced_partitions(costs, k, equal_size))
    assert ours <= differencing(costs, k, equal_size)


@pytest.mark.parametrize("equal_size", [True, False])
def test_small_cases_are_within_a_tenth_of_the_best_and_mostly_the_best(equal_size):
    generator = random.Random(3)
    best = 0
    for _ in range(40):
        k = generator.choice([2, 3])
        costs = [generator.randint(1, 60) for _ in range(generator.randint(k, 8 if k == 3 else 10))]
        ours, least = (
            largest_sum(costs, get_seqlen_balanced_partitions(costs, k, equal_size)),
            best_possible(costs, k, equal_size),
        )
        assert least <= ours <= least * 1.1
        best += ours == least
    assert best >= 30


def test_one_very_long_sample_is_with_the_shortest():
    costs = [1000, *range(1, 16)]
    groups = get_seqlen_balanced_partitions(costs, 4, True)
    assert [0, 1, 2, 3] in groups  # 1000 + 1 + 2 + 3: no group of four can hold it and be less
    others = [sum(costs[i] for i in group) for group in groups if 0 not in group]
    assert sum(others) == sum(range(4, 16))


def test_long_tails_end_at_the_mean_where_differencing_stays_far_above():
    costs = np.random.default_rng(0).lognormal(6, 1, 2048).astype(int).tolist()
    plain = differencing(costs, 32, True) / (sum(costs) / 32) - 1
    ours = imbalance(costs, get_seqlen_balanced_partitions(costs, 32, True))
    assert plain > 0.05
    assert ours < 1e-4


def test_many_samples_begin_with_the_largest_first(monkeypatch):
    """Above a number of samples times groups the start is another, the result as good."""
    costs = np.random.default_rng(1).integers(1, 4000, 600).tolist()
    monkeypatch.setattr(balance, "DIFFERENCING_CELLS", 0)
    groups = get_seqlen_balanced_partitions(costs, 16, False)
    assert sorted(i for group in groups for i in group) == list(range(600))
    assert imbalance(costs, groups) < 1e-3


def test_the_order_of_equal_costs_does_not_come_from_chance():
    costs = [7, 7, 3, 3, 7, 7, 3, 3]
    assert get_seqlen_balanced_partitions(costs, 2, True) == get_seqlen_balanced_partitions(np.array(costs), 2, True)
    assert get_seqlen_balanced_partitions([1.0] * 6, 3, True) == get_seqlen_balanced_partitions([1] * 6, 3, True)


@pytest.mark.parametrize(
    "costs, k, message",
    [
        ([1, -2], 2, r"sample 1 costs -2; costs must be finite and not negative"),
        ([float("nan")], 1, r"sample 0 costs nan"),
        ([[1, 2]], 1, r"one number a sample, not an array of shape \(1, 2\)"),
        ([1], 0, r"cannot make k=0 groups; k must be 1 or more"),
    ],
)
def test_what_is_no_list_of_costs_is_refused(costs, k, message):
    with pytest.raises(ValueError, match=message):
        get_seqlen_balanced_partitions(costs, k, True)


def test_flops_of_qwen2_half_a_billion():
    """Three times the forward pass (backward costs two): what verl's FlopsCounter says of the same lengths and shape."""
    layer = 3 * 896 * 4864 + 896 * (896 + 128 + 128 + 896)
    parameters = 24 * layer + 2 * 151936 * 896  # embedding and head
    flops = sequence_flops([512, 1024], parameters, num_layers=24, attention_width=14 * 64)
    assert 3 * flops.sum() == 5_976_077_893_632


def test_balance_by_flops_is_another_balance_than_by_tokens():
    lengths = [8000, 1000, 1000, 1000, 1000, 1000, 1000, 1000, 1000]
    flops = sequence_flops(lengths, 10**6, 4, 1024)  # attention of the long one is 7 times its matrices
    by_tokens = get_seqlen_balanced_partitions(lengths, 2, False)
    by_flops = get_seqlen_balanced_partitions(flops, 2, False)
    assert [0] in by_tokens and [0] in by_flops
    lengths[1] = 7000
    flops = sequence_flops(lengths, 10**6, 4, 1024)
    assert imbalance(flops, get_seqlen_balanced_partitions(flops, 2, False)) < imbalance(
        flops, get_seqlen_balanced_partitions(lengths, 2, False)
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 8), st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_rebalanced_groups_keep_the_budget(tokens, k, room):
    groups = [list(range(g, len(tokens), k)) for g in range(k)]
    budget = max(sum(tokens[i] for i in group) for group in groups) + room
    costs = [t * t for t in tokens]
    better = rebalance(costs, tokens, groups, budget)
    assert sorted(i for group in better for i in group) == list(range(len(tokens)))
    assert all(sum(tokens[i] for i in group) <= budget for group in better)
    assert largest_sum(costs, better) <= largest_sum(costs, groups)
    assert sum(not group for group in better) == max(0, k - len(tokens))


def test_imbalance_is_the_largest_over_the_mean():
    assert imbalance([3, 1, 2], [[0], [1, 2]]) == 0
    assert imbalance([4, 1, 1], [[0], [1, 2]]) == pytest.approx(4 / 3 - 1)
    assert imbalance([], [[], []]) == 0
