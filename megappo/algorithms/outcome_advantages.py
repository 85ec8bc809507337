"""How much better than its baseline was each response? Advantages without a critic: GRPO, RLOO, REINFORCE++, ReMax.

legend: b samples, r response width; masks are bool, True on valid tokens
group_ids (b,) int: equal for the responses to one prompt, in any order, with any values; groups may differ in size.
scores (b,): one of each response. A KL penalty in the reward goes into them as `token_rewards.sum(-1)`.
A response without valid tokens counts in no group and gets 0 everywhere, whatever its score (NaN included).
A group of one has no baseline and so no signal: 0.
Every token of a response gets the same advantage, unless said otherwise; results are (b, r) float32, 0 at masked places.
Nothing is whitened here: where a method wants that, `masked_whiten` does it once the whole batch is there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megappo.algorithms.advantages import gae
from megappo.algorithms.masking import zero_masked


class GroupMoments(NamedTuple):
    """Of each sample's group, (b,) float64: how many responses count, their mean and unbiased deviation (0 for one)."""

    size: Tensor
    mean: Tensor
    std: Tensor


def group_moments(scores: Tensor, group_ids: Tensor, response_mask: Tensor) -> GroupMoments:
    """Moments of the scores of each sample's group. The deviation of equal scores is exactly 0."""
    _check(scores, group_ids, response_mask)
    counts = response_mask.any(dim=-1)
    kept = torch.where(counts, scores.detach().double(), 0.0)
    group = torch.unique(group_ids, return_inverse=True)[1]
    size = _group_sum(counts.double(), group)
    # Around a score of the group, so that equal scores have a mean that is equal to them to the last bit.
    anchor = torch.zeros_like(kept).scatter_reduce(
        0, group, torch.where(counts, kept, -torch.inf), reduce="amax", include_self=False
    )[group]
    offsets = torch.where(counts, kept - anchor, 0.0)
    mean = _group_sum(offsets, group) / size.clamp(min=1)
    squares = _group_sum(torch.where(counts, offsets - mean, 0.0).square(), group)
    return GroupMoments(size, torch.where(size > 0, anchor + mean, 0.0), (squares / (size - 1).clamp(min=1)).sqrt())


def grpo_advantages(scores: Tensor, group_ids: Tensor, response_mask: Tensor, normalize_by_std: bool = True) -> Tensor:
    """GRPO (arXiv:2402.03300, section 4.1.2): A = (score - mean of the group) / (std of the group + 1e-6).

    normalize_by_std=False leaves the division out: Dr. GRPO (arXiv:2503.20783), where hard and easy prompts weigh the same.
    """
    moments = group_moments(scores, group_ids, response_mask)
    centred = scores.detach().double() - moments.mean
    return _spread(centred / (moments.std + 1e-6) if normalize_by_std else centred, response_mask)


def rloo_advantages(scores: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """RLOO (arXiv:2402.14740): A = score - mean of the other scores of the group = n / (n - 1) * (score - mean)."""
    size, mean, _ = group_moments(scores, group_ids, response_mask)
    return _spread((scores.detach().double() - mean) * size / (size - 1).clamp(min=1), response_mask)


def reinforce_plus_plus_advantages(token_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """REINFORCE++ (arXiv:2501.03262): A_t = sum of gamma^k * r_{t+k} over the valid tokens of the response; the token rewards
    (b, r) carry the score at the last token and the k1 penalty at each. To be whitened over all valid tokens of the batch.
    """
    return gae(token_rewards, torch.zeros_like(token_rewards), response_mask, gamma, 1.0)[0]


def reinforce_plus_plus_baseline_advantages(scores: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """REINFORCE++-baseline (arXiv:2501.03262): score - mean of the group. To be whitened over all valid tokens of the batch:
    unlike GRPO's, the deviation is one of the whole batch.
    """
    return grpo_advantages(scores, group_ids, response_mask, normalize_by_std=False)


def remax_advantages(token_rewards: Tensor, greedy_scores: Tensor, response_mask: Tensor) -> Tensor:
    """ReMax (arXiv:2310.10505, algorithm 2): A_t = sum of the rewards from t on - score of the greedy response.

    greedy_scores (b,): of the greedy response to each sample's prompt.
    """
    if greedy_scores.shape != token_rewards.shape[:1]:
        raise ValueError(
            f"one greedy score a response is needed: {tuple(greedy_scores.shape)} for {token_rewards.shape[0]} responses"
        )
    returns, _ = gae(token_rewards, torch.zeros_like(token_rewards), response_mask, 1.0, 1.0)
    return zero_masked(returns - greedy_scores.detach().float().unsqueeze(-1), response_mask)


def _group_sum(values: Tensor, group: Tensor) -> Tensor:
    """Of each sample (b,): the sum over its group; group (b,): 0, 1, 2 ..."""
    return torch.zeros_like(values).index_add(0, group, values)[group]


def _spread(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """One advantage a response (b,) at its valid tokens (b, r)."""
    return zero_masked(advantages.unsqueeze(-1), response_mask)


def _check(scores: Tensor, group_ids: Tensor, response_mask: Tensor) -> None:
    if response_mask.dim() != 2 or scores.shape != group_ids.shape or scores.shape != response_mask.shape[:1]:
        raise ValueError(
            f"scores and group_ids need one entry a response: {tuple(scores.shape)} and {tuple(group_ids.shape)} "
            f"for a response_mask of {tuple(response_mask.shape)}"
        )
