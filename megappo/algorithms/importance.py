"""How is the gap between engine and trainer corrected? `importance_weights`, factors of the policy loss.

The engine samples with its own kernels and precision: tokens come from `rollout_log_probs`, gradients are of `old_log_probs`.
    w = exp(old_log_probs - rollout_log_probs)
makes the update one of the trainer's policy. Truncated (TIS): min(w, cap) (Ionides, "Truncated importance sampling", 2008; for
this gap Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025). Masked (MIS): w where it
lies in [floor, cap], else 0 (Liu et al., "When speed kills stability", 2025): what no bound can mend is left out.

legend: b samples, r response width; masks are bool, True on valid tokens
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megappo.algorithms.kl import MAX_LOG_RATIO
from megappo.algorithms.masking import zero_masked


class ImportanceWeights(NamedTuple):
    weights: Tensor
    """(b, r) float32, detached, 0 at masked places. Multiply them into the policy loss; left-out tokens stay in its divisor."""
    num: Tensor
    """how many weights there are: valid tokens, or sequences with one"""
    sums: dict[str, Tensor]
    """sums over them, float64: `weight` and `weight_squared` (after the bound), `ratio` (before), `bounded` (cut or left out)"""


def importance_weights(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    level: Literal["token", "sequence"],
    bound: Literal["truncated", "masked"],
    cap: float,
    floor: float = 0.0,
) -> ImportanceWeights:
    """A weight a token. level: `sequence` gives all tokens of a row its product of ratios, which alone is unbiased, but varies
    more the longer it is. floor: only for `masked`. Log ratios are clamped to +-20, so that every weight is finite.
    """
    if not cap > 0 or not 0 <= floor <= cap:
        raise ValueError(f"importance weights lie between floor and cap, 0 <= floor <= cap and cap > 0; got {floor} and {cap}")
    if floor and bound == "truncated":
        raise ValueError(f"truncated importance weights have no floor, got {floor}; use the bound 'masked'")
    log_ratio = zero_masked(old_log_probs.detach(), mask).double() - zero_masked(rollout_log_probs.detach(), mask).double()
    valid = mask
    if level == "sequence":
        log_ratio, valid = log_ratio.sum(-1, keepdim=True), mask.any(-1, keepdim=True)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    inside = (ratio >= floor) & (ratio <= cap)
    weights = ratio.clamp(max=cap) if bound == "truncated" else torch.where(inside, ratio, 0.0)
    columns = {"weight": weights, "weight_squared": weights.square(), "ratio": ratio, "bounded": (~inside).double()}
    sums = {name: torch.where(valid, column, 0.0).sum() for name, column in columns.items()}
    return ImportanceWeights(zero_masked(weights, mask), valid.sum(), sums)


def effective_sample_fraction(num: float, weight_sum: float, weight_squared_sum: float) -> float:
    """(sum of w)^2 / (n * sum of w^2), Kong's effective sample size over the number of samples: 1 where all weights are equal,
    1 / n where one outweighs all others, 0 where there are none. The sums may be those of several ranks."""
    return weight_sum**2 / (num * weight_squared_sum) if num and weight_squared_sum else 0.0
