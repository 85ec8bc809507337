"""Is GAE the recursion over valid tokens, and nothing else?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.algorithms.advantages import gae, gae_by_blocks, place_terminal_reward
from megappo.algorithms.masking import mask_from_lengths

NAN = float("nan")


def gae_by_hand(rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float) -> list[list[float]]:
    """The definition in float64, on the valid tokens of one sample; NaN at masked places."""
    advantages, returns = [NAN] * len(mask), [NAN] * len(mask)
    next_value = next_advantage = 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[t]
            advantages[t], returns[t] = next_advantage, next_advantage + values[t]
    return [advantages, returns]


def test_the_recursion_gives_the_known_numbers() -> None:
    rewards, values = torch.tensor([[0.0, 0.0, 1.0, 0.0]]), torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    advantages, returns = gae(rewards, values, torch.tensor([[True, True, True, False]]), gamma=0.9, gae_lambda=0.8)
    torch.testing.assert_close(returns, torch.tensor([[0.59328, 0.774, 1.0, 0.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[0.49328, 0.574, 0.7, 0.0]]))


@pytest.mark.parametrize("garbage", [0.0, 100.0, -1e30, NAN, float("inf")])
def test_masked_places_in_the_middle_are_as_good_as_deleted(garbage: float) -> None:
    mask = torch.tensor([[True, True, False, False, True, False]])
    values = torch.tensor([[0.5, 0.25, garbage, garbage, 0.5, garbage]])
    rewards = torch.tensor([[0.0, 0.0, garbage, garbage, 1.0, garbage]])
    advantages, returns = gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95)
    torch.testing.assert_close(advantages, torch.tensor([[0.43875, 0.725, 0.0, 0.0, 0.5, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.93875, 0.975, 0.0, 0.0, 1.0, 0.0]]))


@pytest.mark.parametrize("padded", [100.0, NAN])
def test_a_padded_value_never_bootstraps_a_real_token(padded: float) -> None:
    rewards, values = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, padded]])
    advantages, _ = gae(rewards, values, torch.tensor([[True, True, False]]), gamma=1.0, gae_lambda=1.0)
    assert advantages.tolist() == [[1.0, 1.0, 0.0]]


def test_gamma_0_keeps_the_terminal_reward() -> None:
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages, _ = gae(torch.tensor([[0.0, 0.0, 1.0]]), torch.zeros(1, 3), mask, gamma=0.0, gae_lambda=0.95)
    assert advantages.tolist() == [[0.0, 0.0, 1.0]]


def test_a_sample_without_valid_tokens_is_all_zeros() -> None:
    advantages, returns = gae(torch.full((2, 3), NAN), torch.full((2, 3), NAN), torch.zeros(2, 3, dtype=torch.bool), 0.9, 0.9)
    assert advantages.tolist() == returns.tolist() == [[0.0] * 3] * 2


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), width=st.integers(1, 9), gamma=st.sampled_from([0.0, 0.9, 1.0]), lam=st.sampled_from([0.0, 0.5, 0.95, 1.0])
)
def test_any_mask_gives_what_the_definition_gives(data: st.DataObject, width: int, gamma: float, lam: float) -> None:
    number = st.floats(-2, 2, width=32)
    rewards, values = (data.draw(st.lists(number, min_size=width, max_size=width)) for _ in range(2))
    mask = data.draw(st.lists(st.booleans(), min_size=width, max_size=width))
    wanted = torch.tensor(gae_by_hand(rewards, values, mask, gamma, lam), dtype=torch.float64)
    other = [True] * (width // 2) + [False] * (width - width // 2)  # a second sample, so that rows cannot mix unnoticed
    batch = torch.tensor([mask, other])
    got = gae(torch.tensor([rewards, values]), torch.tensor([values, rewards]), batch, gamma, lam)
    for found, known in zip(got, wanted, strict=True):
        torch.testing.assert_close(found[0].double(), known.nan_to_num(0.0), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_the_score_stands_at_the_last_valid_token(length: int) -> None:
    rewards = place_terminal_reward(torch.tensor([2.5]), mask_from_lengths(torch.tensor([length]), 6))
    wanted = [0.0] * 6
    wanted[length - 1] = 2.5
    assert rewards.tolist() == [wanted]
    assert rewards.sum() == 2.5


def test_a_score_without_a_valid_token_has_no_place() -> None:
    mask = torch.tensor([[False, False], [True, False], [True, True]])
    assert place_terminal_reward(torch.tensor([1.0, 2.0, 3.0]), mask).tolist() == [[0.0, 0.0], [2.0, 0.0], [0.0, 3.0]]


@pytest.mark.parametrize("compute", [gae, gae_by_blocks])
@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (1.0, 0.95), (0.99, 0.9), (0.0, 0.5)])
def test_long_responses_equal_a_float64_loop(compute: Callable[..., tuple[torch.Tensor, torch.Tensor]], gamma, lam) -> None:
    generator = torch.Generator().manual_seed(3)
    width = 4097
    rewards, values = (torch.randn(5, width, generator=generator) for _ in range(2))
    mask = torch.rand(5, width, generator=generator) > 0.4  # spans of tools everywhere
    mask[1] = True
    mask[2] = torch.arange(width) < 1000
    mask[3] = False
    rewards, values = torch.where(mask, rewards, NAN), torch.where(mask, values, float("-inf"))
    advantages, returns = compute(rewards, values, mask, gamma, lam)
    for row in range(5):
        wanted = torch.tensor(gae_by_hand(rewards[row].tolist(), values[row].tolist(), mask[row].tolist(), gamma, lam))
        torch.testing.assert_close(torch.stack((advantages[row], returns[row])), wanted.nan_to_num(0.0), atol=1e-5, rtol=1e-6)


def test_rows_that_do_not_lie_side_by_side_and_other_dtypes_are_read_right() -> None:
    rewards, values = torch.randn(6, 8).t()[::2], torch.randn(4, 6, dtype=torch.float64).bfloat16()
    mask = torch.rand(6, 4).t() > 0.3
    found = gae(rewards, values, mask, 0.9, 0.8)
    for row in range(4):
        wanted = gae_by_hand(rewards[row].tolist(), values[row].tolist(), mask[row].tolist(), 0.9, 0.8)
        for got, known in zip(found, wanted, strict=True):
            torch.testing.assert_close(got[row], torch.tensor(known).nan_to_num(0.0))


def test_no_gradient_flows_through_advantages_and_inputs_stay() -> None:
    rewards, values = torch.ones(1, 3, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    for found in (*gae(rewards, values, mask, 0.9, 0.8), *gae_by_blocks(rewards, values, mask, 0.9, 0.8)):
        assert not found.requires_grad
    assert rewards.tolist() == values.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("compute", [gae, gae_by_blocks])
def test_an_empty_batch_has_no_advantages(compute: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    empty = torch.zeros(0, 3)
    assert [tuple(x.shape) for x in compute(empty, empty, empty.bool(), 0.9, 0.8)] == [(0, 3), (0, 3)]


def test_shapes_that_do_not_fit_are_refused() -> None:
    ones, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"one shape.*'values': \(2, 4\)"):
        gae(ones, torch.ones(2, 4), mask, 0.9, 0.8)
    with pytest.raises(ValueError, match=r"must be bool, got torch.float32"):
        gae(ones, ones, ones, 0.9, 0.8)
