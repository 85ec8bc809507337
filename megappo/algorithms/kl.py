"""How far has the policy moved from the reference? KL estimates a token (Schulman, "Approximating KL Divergence", 2020).

legend: b samples, r response width; masks are bool, True on valid tokens
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from megappo.algorithms.masking import zero_masked

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this: exp(20) is finite in every dtype, and beyond it the gradient is 0, never NaN."""


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kind: Literal["k1", "k2", "k3"] = "k1") -> Tensor:
    """KL(policy | reference) of each sampled token (b, r), float32, 0 at masked places. With d = log pi - log ref:

        k1 = d                  unbiased, may be negative
        k2 = d^2 / 2            biased, low variance
        k3 = exp(-d) - 1 + d    unbiased, never negative

    k1 suits a penalty in the reward; as a loss its gradient has mean 0 and does nothing.
    """
    # The difference of two masked -inf would be NaN, so masked places are emptied first.
    d = clamped_log_ratio(log_probs, ref_log_probs, mask)
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    return torch.expm1(-d) + d


def kl_in_reward(
    token_rewards: Tensor, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kl_coef: float
) -> tuple[Tensor, Tensor]:
    """Token rewards less kl_coef * k1 at valid places (b, r), and the k1 estimates themselves (b, r)."""
    kl = kl_estimate(log_probs, ref_log_probs, mask, "k1")
    return zero_masked(token_rewards, mask) - kl_coef * kl, kl


def adaptive_kl_coef(kl_coef: float, kl: float, target: float, gain: float = 0.1) -> float:
    """The coefficient of the next step, so that the measured KL goes to the target (arXiv:1909.08593):

        e = clip(kl / target - 1, -0.2, 0.2)
        next kl_coef = kl_coef * (1 + gain * e)

    gain: 0.1 in the paper, a step. A KL that is not finite (a skipped step) changes nothing.
    """
    if target <= 0:
        raise ValueError(f"the target KL must be above 0, got {target}")
    if not math.isfinite(kl):
        return kl_coef
    return kl_coef * (1 + gain * min(max(kl / target - 1, -0.2), 0.2))


def clamped_log_ratio(log_probs: Tensor, other_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log_probs - other_log_probs within +-MAX_LOG_RATIO, float32, 0 at masked places."""
    difference = zero_masked(log_probs, mask) - zero_masked(other_log_probs, mask)
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
