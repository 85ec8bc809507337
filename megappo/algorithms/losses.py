"""What do actor and critic minimise? Clipped policy losses, the value loss, entropy and KL terms, as sums over valid tokens.

Sums, never means: the caller divides once by the divisor of the whole optimizer batch (see `aggregation.py`), so that neither
micro-batches nor data-parallel ranks change the result. All functions work token by token, on tensors of any one shape;
masks are bool, True on valid tokens. `weights`: a factor a token of the loss (the aggregation's, times an importance correction);
None is 1. The metrics that a loss returns are sums over valid tokens, too, without weights and detached.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megappo.algorithms.kl import clamped_log_ratio, kl_estimate
from megappo.algorithms.masking import masked_sum, zero_masked


def ppo_clip_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO (arXiv:1707.06347, equation 7): sum of max(-A * ratio, -A * clip(ratio, 1 - low, 1 + high)),
    with ratio = exp(log_probs - old_log_probs).

    clip_range: low, and high where clip_range_high is None; another high is DAPO's clip-higher (arXiv:2503.14476, equation 10).
    dual_clip: c > 1 bounds the loss of a token with A < 0 by -c * A, however large its ratio (arXiv:1912.09729).

    Metric sums: `clipfrac` (tokens whose loss is the clipped one), `approx_kl` (k3 estimate of KL(old | new):
    ratio - 1 - log ratio), `ratio`; with dual_clip `dual_clipfrac`.
    """
    log_ratio = clamped_log_ratio(log_probs, old_log_probs, mask)
    return _clipped(log_ratio, log_ratio, advantages, mask, clip_range, clip_range_high, dual_clip, weights)


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    rows: Tensor,
    clip_range: float,
    clip_range_high: float | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO (arXiv:2507.18071, equations 5 and 7; its token form, 13 and 14): PPO's clipped loss with one ratio a sequence,

        s = exp(mean over its valid tokens of log_probs - old_log_probs)

    The gradient goes through each token's log_prob with the factor s. Belongs to the aggregation `seq_mean_token_mean`.
    rows: int, the sequence of each token, shaped like log_probs; all tokens of a sequence must be here.

    Metric sums as `ppo_clip_loss`: `clipfrac` and `ratio` of the sequence ratio, `approx_kl` of the tokens' own.
    """
    log_ratio = clamped_log_ratio(log_probs, old_log_probs, mask)
    row = torch.unique(rows, return_inverse=True)[1].flatten()
    totals = torch.zeros(2, row.numel(), dtype=torch.float64, device=mask.device)
    totals.index_add_(1, row, torch.stack((log_ratio.detach().flatten(), mask.flatten())).double())
    mean = (totals[0] / totals[1].clamp(min=1))[row].float().view_as(log_ratio)
    sequence_log_ratio = zero_masked(mean + (log_ratio - log_ratio.detach()), mask)
    return _clipped(sequence_log_ratio, log_ratio, advantages, mask, clip_range, clip_range_high, None, weights)


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_range: float,
    clip_range_high: float | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO (arXiv:2506.13585, equations 4 and 5): sum of -stop_gradient(clip(ratio, 1 - low, 1 + high)) * A * log_prob.

    The importance weight is clipped, not the token: every token keeps a gradient. clip_range >= 1 sets no lower bound.
    Metric sums as `ppo_clip_loss`; `clipfrac`: tokens whose weight was clipped.
    """
    log_ratio = clamped_log_ratio(log_probs, old_log_probs, mask).detach()
    ratio = log_ratio.exp()
    clipped = _clip(ratio, clip_range, clip_range_high)
    loss = _weighted_sum(-clipped * zero_masked(advantages, mask) * zero_masked(log_probs, mask), mask, weights)
    return loss, _ratio_sums(clipped != ratio, log_ratio, ratio, mask)


def entropy_loss(entropy: Tensor, mask: Tensor, entropy_coef: float, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The entropy bonus (arXiv:1602.01783, section 4) as a loss, -entropy_coef * sum of the entropies, and their plain sum."""
    return -entropy_coef * _weighted_sum(entropy, mask, weights), masked_sum(entropy.detach(), mask)


def kl_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    kind: Literal["k1", "k2", "k3"],
    kl_coef: float,
    weights: Tensor | None = None,
) -> Tensor:
    """kl_coef * sum of the KL estimates (see `kl_estimate`).

    As a loss k2 has the gradient of KL(policy | reference) on policy, k3 (GRPO's, arXiv:2402.03300, equation 4) that of
    KL(reference | policy); k1's has mean 0 and pulls nowhere.
    """
    return kl_coef * _weighted_sum(kl_estimate(log_probs, ref_log_probs, mask, kind), mask, weights)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip_range: float | None,
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


def _clipped(
    log_ratio: Tensor,
    token_log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    low: float,
    high: float | None,
    dual_clip: float | None,
    weights: Tensor | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = log_ratio.exp()
    advantages = zero_masked(advantages, mask)
    unclipped = -advantages * ratio
    clipped = -advantages * _clip(ratio, low, high)
    loss = torch.maximum(unclipped, clipped)
    with torch.no_grad():
        sums = _ratio_sums(clipped > unclipped, token_log_ratio, ratio, mask)
    if dual_clip is not None:
        bound = dual_clip * advantages.abs()  # of A >= 0 the loss is not above 0
        sums["dual_clipfrac"] = masked_sum(loss.detach() > bound, mask)
        loss = torch.minimum(loss, bound)
    return _weighted_sum(loss, mask, weights), sums


def _clip(ratio: Tensor, low: float, high: float | None) -> Tensor:
    """high: `low` where None."""
    return ratio.clamp(1 - low, 1 + (low if high is None else high))


def _ratio_sums(is_clipped: Tensor, log_ratio: Tensor, ratio: Tensor, mask: Tensor) -> dict[str, Tensor]:
    log_ratio = log_ratio.detach()
    return {
        "clipfrac": masked_sum(is_clipped, mask),
        "approx_kl": masked_sum(torch.expm1(log_ratio) - log_ratio, mask),
        "ratio": masked_sum(ratio.detach(), mask),
    }


def _weighted_sum(token_loss: Tensor, mask: Tensor, weights: Tensor | None) -> Tensor:
    token_loss = zero_masked(token_loss, mask)
    return token_loss.sum() if weights is None else (token_loss * zero_masked(weights, mask)).sum()
