"""Are the losses PPO's, summed over valid tokens, with finite gradients?"""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from megappo.algorithms.kl import kl_estimate, kl_in_reward
from megappo.algorithms.losses import explained_variance, ppo_clip_loss, value_loss

NAN = float("nan")


def valid(*flags: int) -> torch.Tensor:
    return torch.tensor([bool(flag) for flag in flags])


@pytest.mark.parametrize(
    "ratio, advantage, loss, is_clipped",
    [
        (1.0, 2.0, -2.0, 0),
        (1.5, 2.0, -2.4, 1),  # gain is capped at 1.2 * 2
        (0.5, 2.0, -1.0, 0),  # a loss is not
        (0.5, -2.0, 1.6, 1),  # 0.8 * 2
        (1.5, -2.0, 3.0, 0),
    ],
)
def test_the_policy_loss_is_the_worse_of_clipped_and_unclipped(
    ratio: float, advantage: float, loss: float, is_clipped: int
) -> None:
    new, old = torch.tensor([math.log(ratio) - 1]), torch.tensor([-1.0])
    total, sums = ppo_clip_loss(new, old, torch.tensor([advantage]), valid(1), clip_range=0.2)
    assert total.item() == pytest.approx(loss, rel=1e-6)
    assert sums["clipfrac"].item() == is_clipped
    assert sums["ratio"].item() == pytest.approx(ratio, rel=1e-6)
    assert sums["approx_kl"].item() == pytest.approx(ratio - 1 - math.log(ratio), abs=1e-6)


def test_the_policy_loss_is_a_sum_so_that_micro_batches_add_up() -> None:
    torch.manual_seed(0)
    new, old, advantages = torch.randn(3, 8, 5).unbind(0)
    mask = torch.rand(8, 5) > 0.3
    whole, sums = ppo_clip_loss(new, old, advantages, mask, 0.2)
    for size in (1, 2, 4):
        parts = [ppo_clip_loss(*(x[i : i + size] for x in (new, old, advantages, mask)), 0.2) for i in range(0, 8, size)]
        torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
        for key, value in sums.items():
            torch.testing.assert_close(sum(found[key] for _, found in parts), value)


def test_a_token_mean_of_unequal_samples_is_global() -> None:
    # lengths 1 and 3, token losses +1 and -1: (1 - 3) / 4 = -0.5; a mean of means would be 0
    advantages, mask = torch.tensor([[-1.0, 9.0, 9.0], [1.0, 1.0, 1.0]]), torch.tensor([[True, False, False], [True, True, True]])
    loss, _ = ppo_clip_loss(torch.zeros(2, 3), torch.zeros(2, 3), advantages, mask, 0.2)
    assert loss / mask.sum() == -0.5


def test_padding_changes_nothing() -> None:
    new, old, advantages, mask = torch.tensor([[-1.0]]), torch.tensor([[-1.1]]), torch.tensor([[2.0]]), torch.tensor([[True]])
    padded = [torch.cat([x, torch.full((1, 10), NAN)], 1) for x in (new, old, advantages)]
    wide = torch.cat([mask, torch.zeros(1, 10, dtype=torch.bool)], 1)
    assert ppo_clip_loss(*padded, wide, 0.2)[0] == ppo_clip_loss(new, old, advantages, mask, 0.2)[0]


def test_an_unchanged_policy_has_ratio_1_and_clips_nothing() -> None:
    log_probs = torch.tensor([-0.3, -20.0, -1e-6])
    loss, sums = ppo_clip_loss(log_probs, log_probs, torch.tensor([1.0, -1.0, 3.0]), valid(1, 1, 1), 0.2)
    assert loss == -3.0
    assert {key: value.item() for key, value in sums.items()} == {"clipfrac": 0.0, "approx_kl": 0.0, "ratio": 3.0}


def test_masked_garbage_reaches_neither_loss_nor_gradient() -> None:
    new = torch.tensor([-1.0, float("-inf"), NAN], requires_grad=True)
    loss, sums = ppo_clip_loss(new, torch.tensor([-1.0, float("-inf"), NAN]), torch.tensor([1.0, NAN, 1.0]), valid(1, 0, 0), 0.2)
    loss.backward()
    assert loss == -1.0
    assert new.grad is not None
    assert new.grad.tolist() == [-1.0, 0.0, 0.0]
    assert all(torch.isfinite(value) for value in sums.values())


def test_the_policy_gradient_at_ratio_1_is_minus_the_advantage() -> None:
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    ppo_clip_loss(new, new.detach(), torch.tensor([0.7, -0.3]), valid(1, 1), 0.2)[0].backward()
    torch.testing.assert_close(new.grad, torch.tensor([-0.7, 0.3]))


def test_no_log_ratio_overflows() -> None:
    new = torch.tensor([90.0, -90.0], requires_grad=True)
    loss, _ = ppo_clip_loss(new, torch.zeros(2), torch.tensor([-1.0, -1.0]), valid(1, 1), 0.2)
    loss.backward()
    assert torch.isfinite(loss)
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()


def test_the_clipped_value_loss_is_the_worse_of_the_two() -> None:
    one = torch.ones(1)
    loss, sums = value_loss(one, torch.zeros(1), one, valid(1), clip_range=0.2)
    assert loss.item() == pytest.approx(0.32)  # 0.5 * max((1 - 1)^2, (0.2 - 1)^2)
    assert sums["vf_clipfrac"] == 1.0  # of the change before the clip


def test_without_a_clip_the_value_loss_is_half_the_squared_error() -> None:
    loss, sums = value_loss(torch.tensor([1.0, 5.0]), torch.tensor([0.0, 0.0]), torch.tensor([3.0, 4.0]), valid(1, 1), None)
    assert loss == 2.5
    assert sums["vf_clipfrac"] == 0.0


@pytest.mark.parametrize("clip_range", [None, 0.2])
def test_masked_values_are_ignored(clip_range: float | None) -> None:
    values = torch.tensor([1.0, NAN], requires_grad=True)
    loss, sums = value_loss(values, torch.tensor([1.0, NAN]), torch.tensor([2.0, NAN]), valid(1, 0), clip_range)
    loss.backward()
    assert loss == 0.5
    assert values.grad is not None
    assert values.grad.tolist() == [-1.0, 0.0]
    assert sums["vf_clipfrac"] == 0.0


@pytest.mark.parametrize("clip_range", [None, 0.3])
@pytest.mark.parametrize("seed", range(3))
def test_value_loss_and_explained_variance_equal_a_float64_loop(seed: int, clip_range: float | None) -> None:
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, 4, 6, generator=generator).unbind(0)
    mask = torch.rand(4, 6, generator=generator) > 0.4
    values, old, returns = (torch.where(mask, x, NAN) for x in (values, old, returns))
    leaf = values.clone().requires_grad_()
    loss, sums = value_loss(leaf, old, returns, mask, clip_range)
    loss.backward()
    tokens = [x[mask].tolist() for x in (values, old, returns)]
    total, moved, gradient = 0.0, 0, []
    for v, o, r in zip(*tokens, strict=True):
        error, slope = (v - r) ** 2, v - r
        if clip_range is not None and abs(v - o) > clip_range:
            moved += 1
            clipped = o + math.copysign(clip_range, v - o)
            if (clipped - r) ** 2 > error:
                error, slope = (clipped - r) ** 2, 0.0
        total += error / 2
        gradient.append(slope)
    assert loss.item() == pytest.approx(total, rel=1e-5)
    assert sums["vf_clipfrac"] == moved
    assert leaf.grad is not None
    assert leaf.grad[mask].tolist() == pytest.approx(gradient, rel=1e-5, abs=1e-6)
    assert (leaf.grad[~mask] == 0).all()
    errors = [r - v for v, r in zip(tokens[0], tokens[2], strict=True)]
    wanted = 1 - statistics.pvariance(errors) / statistics.pvariance(tokens[2])
    assert explained_variance(values, returns, mask).item() == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_explained_variance_is_1_for_a_perfect_and_0_for_a_constant_value() -> None:
    returns, mask = torch.tensor([1.0, 2.0, 3.0, NAN]), valid(1, 1, 1, 0)
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.tensor([2.0, 2.0, 2.0, NAN]), returns, mask) == 0.0
    # errors 0, 1, 2: variance 2/3, that of the returns 2/3
    assert explained_variance(torch.tensor([1.0, 1.0, 1.0, 9.0]), returns, mask).item() == pytest.approx(0.0, abs=1e-6)
    assert torch.isnan(explained_variance(returns, torch.ones(4), mask))


def test_k3_of_small_log_ratios() -> None:
    k3 = kl_estimate(torch.tensor([0.0, -0.1, 0.1]), torch.zeros(3), valid(1, 1, 1), "k3")
    torch.testing.assert_close(k3, torch.tensor([0.0, 0.00517, 0.00484]), atol=5e-6, rtol=0)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kl_estimates_and_their_gradients_are_finite(kind, dtype: torch.dtype) -> None:
    log_probs = torch.tensor([0.0, 0.1, -0.1, 90.0, -90.0, float("-inf")], dtype=dtype, requires_grad=True)
    kl = kl_estimate(log_probs, torch.tensor([0.0] * 5 + [float("-inf")], dtype=dtype), valid(1, 1, 1, 1, 1, 0), kind)
    kl.sum().backward()
    assert kl.dtype == torch.float32
    assert torch.isfinite(kl).all()
    assert log_probs.grad is not None
    assert torch.isfinite(log_probs.grad).all()
    assert kl[-1] == 0
    assert (kl >= 0).all() or kind == "k1"


def test_a_kl_penalty_reaches_valid_tokens_only() -> None:
    rewards, kl = kl_in_reward(torch.tensor([0.0, NAN, 0.0, 5.0]), torch.ones(4), torch.zeros(4), valid(1, 0, 0, 1), kl_coef=0.5)
    assert rewards.tolist() == [-0.5, 0.0, 0.0, 4.5]
    assert kl.tolist() == [1.0, 0.0, 0.0, 1.0]
