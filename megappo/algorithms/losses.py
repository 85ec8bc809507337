"""What do actor and critic minimise? PPO's clipped losses (Schulman et al., arXiv:1707.06347), as sums over valid tokens.

Sums, never means: the caller divides once by the number of valid tokens of the whole optimizer batch, so that neither
micro-batches nor data-parallel ranks change the result. All functions work token by token, on tensors of any one shape;
masks are bool, True on valid tokens. The metrics that a loss returns are sums over valid tokens, too, and detached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algorithms.kl import clamped_log_ratio
from megappo.algorithms.masking import masked_sum, zero_masked


def ppo_clip_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, clip_range: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of max(-A * ratio, -A * clip(ratio, 1 - c, 1 + c)) with ratio = exp(log_probs - old_log_probs).

    Metric sums: `clipfrac` (tokens whose loss is the clipped one), `approx_kl` (k3 estimate of KL(old | new):
    ratio - 1 - log ratio), `ratio`.
    """
    log_ratio = clamped_log_ratio(log_probs, old_log_probs, mask)
    ratio = log_ratio.exp()
    advantages = zero_masked(advantages, mask)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = masked_sum(torch.maximum(unclipped, clipped), mask)
    with torch.no_grad():
        sums = {
            "clipfrac": masked_sum(clipped > unclipped, mask),
            "approx_kl": masked_sum(torch.expm1(log_ratio) - log_ratio, mask),
            "ratio": masked_sum(ratio, mask),
        }
    return loss, sums


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_range: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of (V - R)^2 / 2, or with a clip range c of max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2.

    Metric sum: `vf_clipfrac`, the tokens whose value moved further than the clip range (0 without one).
    """
    values, returns, old_values = (zero_masked(x, mask) for x in (values, returns, old_values))
    squared_error = (values - returns).square()
    if clip_range is None:
        return squared_error.sum() / 2, {"vf_clipfrac": torch.zeros_like(squared_error.sum()).detach()}
    change = values - old_values
    clipped = old_values + change.clamp(-clip_range, clip_range)
    loss = torch.maximum(squared_error, (clipped - returns).square()).sum() / 2
    return loss, {"vf_clipfrac": masked_sum(change.detach().abs() > clip_range, mask)}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - Var(returns - values) / Var(returns) over valid tokens: 1 is perfect, 0 no better than a constant.

    NaN where the returns do not vary.
    """
    errors, targets = zero_masked(returns - values, mask), zero_masked(returns, mask)
    return 1 - _variance(errors, mask) / _variance(targets, mask).where(_variance(targets, mask) > 0, torch.nan)


def _variance(values: Tensor, mask: Tensor) -> Tensor:
    mean = values.sum() / mask.sum().clamp(min=1)
    return zero_masked(values - mean, mask).square().sum() / mask.sum().clamp(min=1)
