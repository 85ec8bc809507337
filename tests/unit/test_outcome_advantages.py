"""Does each method without a critic subtract its own baseline, from its own group, and nothing else?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.algorithms.outcome_advantages import (
    grpo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)

NAN = float("nan")

Advantages = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
BY_GROUP: list[Advantages] = [
    grpo_advantages,
    lambda scores, ids, mask: grpo_advantages(scores, ids, mask, normalize_by_std=False),
    rloo_advantages,
    reinforce_plus_plus_baseline_advantages,
]


def reference(which: int, scores: list[float]) -> list[float]:
    """One group, by the definitions."""
    if len(scores) < 2:
        return [0.0] * len(scores)
    mean = math.fsum(scores) / len(scores)
    if which == 0:
        return [(s - mean) / (statistics.stdev(scores) + 1e-6) for s in scores]
    if which == 2:
        return [s - math.fsum(scores[:i] + scores[i + 1 :]) / (len(scores) - 1) for i, s in enumerate(scores)]
    return [s - mean for s in scores]


def masks(*lengths: int, width: int = 3) -> torch.Tensor:
    return torch.arange(width) < torch.tensor(lengths)[:, None]


def test_grpo_gives_the_known_numbers() -> None:
    scores, ids = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0]), torch.tensor([7, 7, 7, -1, -1])
    found = grpo_advantages(scores, ids, masks(1, 2, 3, 1, 1))
    # group 7: mean 1/3, unbiased std 0.577350; group -1: mean 1.5, std 0.707107
    wanted = [[1.154699, 0, 0], [-0.577349, -0.577349, 0], [-0.577349] * 3, [-0.707106, 0, 0], [0.707106, 0, 0]]
    torch.testing.assert_close(found, torch.tensor(wanted), atol=1e-6, rtol=0)


def test_dr_grpo_only_subtracts_the_mean() -> None:
    found = grpo_advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), masks(1, 1), normalize_by_std=False)
    assert found[:, 0].tolist() == [0.5, -0.5]


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    found = rloo_advantages(torch.tensor([3.0, 0.0, 1.5]), torch.tensor([4, 4, 4]), masks(1, 1, 1))
    assert found[:, 0].tolist() == [2.25, -2.25, 0.0]  # 3 - 0.75, 0 - 2.25, 1.5 - 1.5


def test_reinforce_plus_plus_sums_what_is_still_to_come() -> None:
    mask = torch.tensor([[True, False, True], [True, True, False]])  # a tool span in the middle
    rewards = torch.tensor([[0.5, NAN, 1.0], [0.0, 2.0, NAN]])
    advantages = reinforce_plus_plus_advantages(rewards, mask, gamma=0.5)
    assert advantages.tolist() == [[1.0, 0.0, 1.0], [1.0, 2.0, 0.0]]


def test_the_baseline_variant_subtracts_the_mean_of_the_group() -> None:
    scores, ids = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
    found = reinforce_plus_plus_baseline_advantages(scores, ids, masks(3, 1))
    assert found.tolist() == [[0.5, 0.5, 0.5], [-0.5, 0.0, 0.0]]


def test_remax_subtracts_the_greedy_score() -> None:
    mask = torch.tensor([[True, True, False], [True, False, True]])
    rewards = torch.tensor([[-0.1, 0.9, NAN], [0.0, NAN, 0.25]])
    advantages = remax_advantages(rewards, torch.tensor([0.5, 1.0]), mask)  # of the returns .8 .9 and .25 .25
    torch.testing.assert_close(advantages, torch.tensor([[0.3, 0.4, 0.0], [-0.75, 0.0, -0.75]]))


@pytest.mark.parametrize("which", range(4))
def test_groups_of_one_and_of_equal_scores_have_no_signal(which: int) -> None:
    scores = torch.tensor([5.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    found = BY_GROUP[which](scores, torch.tensor([0, 1, 1, 1, 1, 1, 1]), masks(*[1] * 7))
    assert (found == 0).all()


@pytest.mark.parametrize("which", range(4))
def test_a_sample_without_valid_tokens_counts_in_no_group(which: int) -> None:
    scores, ids = torch.tensor([1.0, NAN, 0.0, float("inf"), 3.0]), torch.tensor([0, 0, 0, 1, 1])
    found = BY_GROUP[which](scores, ids, masks(2, 0, 2, 0, 1))
    wanted = BY_GROUP[which](scores[[0, 2]], ids[[0, 2]], masks(2, 2))
    assert found[[0, 2]].tolist() == wanted.tolist()
    assert (found[[1, 3, 4]] == 0).all()  # the last one has lost the rest of its group


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_groups_in_any_order_equal_the_definition(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 12))
    scores = data.draw(st.lists(st.floats(-10, 10, width=32), min_size=num, max_size=num))
    ids = data.draw(st.lists(st.sampled_from([-3, 0, 2**40, 5]), min_size=num, max_size=num))
    lengths = data.draw(st.lists(st.integers(0, 3), min_size=num, max_size=num))
    for which, method in enumerate(BY_GROUP):
        found = method(torch.tensor(scores), torch.tensor(ids), masks(*lengths))
        for group in set(ids):
            members = [i for i in range(num) if ids[i] == group and lengths[i]]
            wanted = reference(which, [scores[i] for i in members])
            for i, advantage in zip(members, wanted, strict=True):
                assert found[i].tolist() == pytest.approx([advantage] * lengths[i] + [0.0] * (3 - lengths[i]), rel=1e-4, abs=1e-5)


def test_a_large_offset_of_the_scores_costs_no_precision() -> None:
    scores = torch.tensor([1e6 + 1, 1e6, 1e6, 1e6 + 1])
    found = grpo_advantages(scores, torch.zeros(4, dtype=torch.long), masks(1, 1, 1, 1))
    torch.testing.assert_close(found[:, 0], torch.tensor([1.0, -1.0, -1.0, 1.0]) * 0.8660239)


def test_one_entry_a_response_is_asked_for() -> None:
    with pytest.raises(ValueError, match="one entry a response"):
        grpo_advantages(torch.ones(2, 1), torch.ones(2), masks(1, 1))
    with pytest.raises(ValueError, match="one greedy score a response"):
        remax_advantages(torch.ones(2, 3), torch.ones(1), masks(1, 1))
