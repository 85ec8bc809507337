"""Does the KL penalty count valid tokens once, and does its coefficient go to the target?"""

from __future__ import annotations

import math

import pytest
import torch

from megappo.algorithms.kl import adaptive_kl_coef, kl_estimate, kl_in_reward
from megappo.algorithms.masking import masked_mean

NAN = float("nan")


@pytest.mark.parametrize("kind, wanted", [("k1", -0.7), ("k2", 0.245), ("k3", 0.31375270747)])
def test_known_estimates(kind, wanted: float) -> None:
    found = kl_estimate(torch.tensor([-1.2]), torch.tensor([-0.5]), torch.tensor([True]), kind)
    assert found.item() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_estimate_is_unbiased(kind) -> None:
    torch.manual_seed(0)
    policy, ref = torch.randn(6).double().log_softmax(-1), torch.randn(6).double().log_softmax(-1)
    exact = sum(math.exp(p) * (p - r) for p, r in zip(policy.tolist(), ref.tolist(), strict=True))
    estimates = kl_estimate(policy, ref, torch.ones(6, dtype=torch.bool), kind)
    assert (policy.exp() * estimates).sum().item() == pytest.approx(exact, rel=1e-5)


def test_more_padding_changes_neither_penalty_nor_metric() -> None:
    mask = torch.tensor([[True, False, False, True]])
    one = [torch.tensor([[0.0, NAN, NAN, 1.0]]), torch.ones(1, 4), torch.zeros(1, 4), mask]
    wide = [torch.nn.functional.pad(x, (0, 9), value=False if x is mask else NAN) for x in one]
    for tensors in (one, wide):
        rewards, kl = kl_in_reward(*tensors, kl_coef=1.0)
        assert rewards[0, :4].tolist() == [-1.0, 0.0, 0.0, 0.0]
        assert rewards.sum() == -1.0
        assert masked_mean(kl, tensors[3]) == 1.0


@pytest.mark.parametrize(
    "kl, wanted",
    [
        (6.0, 0.2),
        (6.6, 0.2 * 1.01),  # 10 % above: 0.1 of it
        (5.4, 0.2 * 0.99),
        (60.0, 0.2 * 1.02),  # clipped at 20 %
        (-3.0, 0.2 * 0.98),  # a k1 mean may be negative
        (NAN, 0.2),
        (math.inf, 0.2),
    ],
)
def test_the_controller_moves_towards_the_target(kl: float, wanted: float) -> None:
    assert adaptive_kl_coef(0.2, kl, target=6.0) == pytest.approx(wanted, rel=1e-12)


def test_the_controller_finds_the_coefficient_that_holds_the_target() -> None:
    kl_coef = 0.01
    for _ in range(2000):
        kl_coef = adaptive_kl_coef(kl_coef, 0.6 / kl_coef, target=6.0)
    assert kl_coef == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("target", [0.0, -1.0])
def test_a_target_of_0_is_refused(target: float) -> None:
    with pytest.raises(ValueError, match="target KL must be above 0"):
        adaptive_kl_coef(0.1, 1.0, target)
