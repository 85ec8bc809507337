"""What does a step learn from its samples? Scores made fit to learn from, advantages, and the weights of the loss: pure columns.

The driver does this itself: it is light work over whole batches, so no rank holds a part of it. `algorithms/` has the formulas.
"""

from __future__ import annotations

import math

from torch import Tensor

from megappo.algorithms.advantages import gae, place_terminal_reward
from megappo.algorithms.aggregation import loss_weights
from megappo.algorithms.importance import effective_sample_fraction, importance_weights
from megappo.algorithms.kl import MAX_LOG_RATIO, kl_in_reward
from megappo.algorithms.losses import explained_variance
from megappo.algorithms.masking import masked_mean, masked_whiten
from megappo.algorithms.outcome_advantages import (
    grpo_advantages,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
    remax_advantages,
    rloo_advantages,
)
from megappo.algorithms.reward_shaping import overlong_penalty
from megappo.config.schema_learning import AlgorithmConfig, RewardConfig
from megappo.data.proto import DataProto

Metrics = dict[str, float]


def less_overlong(scores: Tensor, lengths: Tensor, reward: RewardConfig, max_new_tokens: int) -> Tensor:
    """Scores (b,) less what responses of these lengths lose in the overlong buffer."""
    if not reward.overlong_buffer:
        return scores
    return scores + reward.overlong_penalty * overlong_penalty(lengths, max_new_tokens, reward.overlong_buffer)


def add_advantages(batch: DataProto, algorithm: AlgorithmConfig, kl_coef: float) -> Metrics:
    """Add `advantages` (b, r), and `returns` (b, r) where values are learnt.

    batch: (b, r) response_mask, old_log_probs, ref_log_probs where there is a reference, values for `gae`; (b,) learnt_scores,
    group_ids, greedy_scores for `remax`."""
    columns, mask = batch.batch, batch.batch["response_mask"]
    metrics: Metrics = {}
    rewards = place_terminal_reward(columns["learnt_scores"], mask)
    if "ref_log_probs" in columns:
        rewards, kl = kl_in_reward(rewards, columns["old_log_probs"], columns["ref_log_probs"], mask, kl_coef)
        metrics["actor/ref_kl"] = masked_mean(kl, mask).item()
    if algorithm.advantages == "gae":
        advantages, columns["returns"] = gae(rewards, columns["values"], mask, algorithm.gamma, algorithm.gae_lambda)
    else:
        advantages = _outcome_advantages(rewards, batch, algorithm)
    mean = masked_mean(advantages, mask)
    metrics["advantages/mean"] = mean.item()
    metrics["advantages/std"] = masked_mean((advantages - mean).square(), mask).sqrt().item()
    columns["advantages"] = masked_whiten(advantages, mask) if algorithm.whiten_advantages else advantages
    return metrics


def _outcome_advantages(rewards: Tensor, batch: DataProto, algorithm: AlgorithmConfig) -> Tensor:
    """Those without a critic, not whitened; the KL penalty counts in a response's score."""
    mask, groups = batch.batch["response_mask"], batch.batch["group_ids"]
    kind, scores = algorithm.advantages, rewards.sum(dim=-1)
    if kind == "grpo":
        return grpo_advantages(scores, groups, mask, algorithm.normalize_by_std)
    if kind == "rloo":
        return rloo_advantages(scores, groups, mask)
    if kind == "reinforce_plus_plus_baseline":
        return reinforce_plus_plus_baseline_advantages(scores, groups, mask)
    if kind == "remax":
        return remax_advantages(rewards, batch.batch["greedy_scores"], mask)
    return reinforce_plus_plus_advantages(rewards, mask, algorithm.gamma)


def add_loss_weights(batch: DataProto, algorithm: AlgorithmConfig) -> Metrics:
    """Add `loss_weight` and `share` (b, r), and `importance` (b, r) where the gap between engine and trainer is corrected.

    batch: response_mask, old_log_probs, rollout_log_probs (b, r)."""
    columns, mask, correction = batch.batch, batch.batch["response_mask"], algorithm.importance
    assert algorithm.loss_aggregation is not None, "resolved"
    columns["loss_weight"], columns["share"] = loss_weights(mask, algorithm.loss_aggregation, algorithm.loss_length)
    is_corrected = correction.bound != "none"
    weights, num, sums = importance_weights(
        columns["old_log_probs"],
        columns["rollout_log_probs"],
        mask,
        correction.level,
        "masked" if correction.bound == "masked" else "truncated",
        correction.cap if is_corrected else math.exp(MAX_LOG_RATIO),
        correction.floor,
    )
    count = num.item()
    metrics = {
        "rollout/effective_sample_fraction": effective_sample_fraction(
            count, sums["weight"].item(), sums["weight_squared"].item()
        )
    }
    if is_corrected:
        columns["importance"] = weights
        metrics["rollout/importance_mean"] = sums["ratio"].item() / max(count, 1)
        metrics["rollout/importance_bounded"] = sums["bounded"].item() / max(count, 1)
    return metrics


def value_metrics(batch: DataProto) -> Metrics:
    """How well the critic's values fit the returns."""
    columns, mask = batch.batch, batch.batch["response_mask"]
    values, returns = columns["values"], columns["returns"]
    return {
        "critic/explained_variance": explained_variance(values, returns, mask).item(),
        "critic/values_mean": masked_mean(values, mask).item(),
        "critic/returns_mean": masked_mean(returns, mask).item(),
    }
