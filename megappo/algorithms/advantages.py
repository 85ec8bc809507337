"""How much better than expected was each token? Generalized advantage estimation (Schulman et al., arXiv:1506.02438).

legend: b samples, r response width; masks are bool, True on valid tokens
"""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algorithms.masking import zero_masked

BLOCK = 64  # tokens that one product sums


def place_terminal_reward(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Token rewards (b, r): the score of each sample (b,) at its last valid token, 0 elsewhere.

    A row without valid tokens has no place for its score and stays 0.
    """
    width = response_mask.shape[-1]
    positions = torch.arange(width, device=response_mask.device)
    last = torch.where(response_mask, positions, -1).amax(-1, keepdim=True)
    return torch.where(positions == last, scores.float().unsqueeze(-1), 0.0)


def gae(token_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both (b, r) float32 and 0 at masked places; no gradient flows through them.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lambda * A_{t+1}
        returns = A + V

    t counts valid tokens only: the result is the one with the masked tokens deleted, wherever they stand (prompts and tool
    outputs in the middle). After the last valid token the value is 0, whether the response ended by itself or was cut.
    """
    _same_shape(token_rewards=token_rewards, values=values, response_mask=response_mask)
    if response_mask.device.type != "cpu":
        return gae_by_blocks(token_rewards, values, response_mask, gamma, gae_lambda)
    from megappo.algorithms.gae_scan import scan_rows  # numba, which only who computes advantages needs

    rewards, values = (x.detach().float().contiguous() for x in (token_rewards, values))
    advantages, returns = torch.empty_like(rewards), torch.empty_like(rewards)
    arrays = [x.numpy() for x in (rewards, values, response_mask.contiguous())]
    scan_rows(*arrays, float(gamma), float(gamma * gae_lambda), advantages.numpy(), returns.numpy())
    return advantages, returns


def gae_by_blocks(
    token_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """`gae` in plain torch, for a device that numba does not reach: a few whole-tensor steps instead of r small ones."""
    rewards, values = (zero_masked(x.detach(), response_mask) for x in (token_rewards, values))
    order = _valid_first(response_mask)
    if order is not None:
        rewards, values = rewards.gather(-1, order), values.gather(-1, order)
    # Right of the last valid token all is 0, so the recursion needs no mask.
    deltas = torch.nn.functional.pad(values[:, 1:], (0, 1)).mul_(gamma).add_(rewards).sub_(values)
    advantages = _discounted_sums(deltas, gamma * gae_lambda)
    returns = advantages + values
    if order is not None:
        advantages, returns = (torch.zeros_like(values).scatter(-1, order, x) for x in (advantages, returns))
    return zero_masked(advantages, response_mask), zero_masked(returns, response_mask)


def _discounted_sums(x: Tensor, decay: float) -> Tensor:
    """(b, r): at t the sum of decay^k * x_{t+k}. Inside blocks it is one product with a triangle; what a block hands to the one
    before it is the same sum again, over the blocks."""
    samples, width = x.shape
    num_blocks = -(-width // BLOCK)
    blocks = torch.nn.functional.pad(x, (0, num_blocks * BLOCK - width)).view(samples, num_blocks, BLOCK)
    place = torch.arange(BLOCK, device=x.device, dtype=torch.float64)
    ahead = place[:, None] - place  # (from, to)
    sums = blocks @ torch.where(ahead >= 0, decay ** ahead.clamp(min=0), 0.0).float()
    if num_blocks > 1:
        at_starts = _discounted_sums(sums[:, :, 0], decay**BLOCK)
        of_next = torch.nn.functional.pad(at_starts[:, 1:], (0, 1))
        sums.addcmul_(of_next.unsqueeze(-1), (decay ** (BLOCK - place)).float())
    return sums.view(samples, num_blocks * BLOCK)[:, :width]


def _same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
        raise ValueError(f"GAE needs one shape (samples, response width), got {shapes}")
    if tensors["response_mask"].dtype != torch.bool:
        raise ValueError(f"response_mask must be bool, got {tensors['response_mask'].dtype}")


def _valid_first(mask: Tensor) -> Tensor | None:
    """Indices (b, r) that move valid tokens to the front, in order; None where they stand there already."""
    if not bool((~mask[:, :-1] & mask[:, 1:]).any()):
        return None
    return torch.argsort(~mask, dim=-1, stable=True)
