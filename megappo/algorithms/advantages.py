"""How much better than expected was each token? Generalized advantage estimation (Schulman et al., arXiv:1506.02438).

legend: b samples, r response width; masks are bool, True on valid tokens
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algorithms.masking import zero_masked


def place_terminal_reward(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Token rewards (b, r): the score of each sample (b,) at its last valid token, 0 elsewhere.

    A row without valid tokens has no place for its score and stays 0.
    """
    width = response_mask.shape[-1]
    positions = torch.arange(width, device=response_mask.device)
    last = torch.where(response_mask, positions, -1).amax(-1, keepdim=True)
    return torch.where(positions == last, scores.float().unsqueeze(-1), 0.0)


def gae(token_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both (b, r) float32 and 0 at masked places.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lambda * A_{t+1}
        returns = A + V

    t counts valid tokens only: the result is the one with the masked tokens deleted, wherever they stand. After the last valid
    token the value is 0, whether the response ended by itself or was cut.
    """
    rewards, values = zero_masked(token_rewards, response_mask), zero_masked(values, response_mask)
    order = _valid_first(response_mask)
    if order is not None:
        rewards, values = rewards.gather(-1, order), values.gather(-1, order)
    # Right of the last valid token all is 0, so the recursion needs no mask: one fused operation a token, on time-major rows.
    next_values = torch.nn.functional.pad(values[:, 1:], (0, 1))
    advantages = (rewards + gamma * next_values - values).t().contiguous()
    rows = advantages.unbind(0)
    for t in range(len(rows) - 2, -1, -1):
        rows[t].add_(rows[t + 1], alpha=gamma * gae_lambda)
    advantages = advantages.t()
    returns = advantages + values
    if order is not None:
        advantages, returns = (torch.zeros_like(values).scatter(-1, order, x) for x in (advantages, returns))
    return zero_masked(advantages, response_mask), zero_masked(returns, response_mask)


def _valid_first(mask: Tensor) -> Tensor | None:
    """Indices (b, r) that move valid tokens to the front, in order; None where they stand there already."""
    if not bool((~mask[:, :-1] & mask[:, 1:]).any()):
        return None
    return torch.argsort(~mask, dim=-1, stable=True)
