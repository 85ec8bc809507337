"""Which tokens count? Masks from lengths or end tokens, and sums, means and whitening over valid tokens only.

legend: b samples, r response width; masks are bool, True on valid tokens
What stands at a masked place never matters, NaN included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mask_from_lengths(lengths: Tensor, width: int) -> Tensor:
    """(b, width) bool: True on the first `lengths[i]` places of row i.

    Lengths, not token ids, say what is valid: the pad token may be the end token.
    """
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(-1)


def response_mask_from_eos(response_ids: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """(b, r) bool: True up to and with the first end token of each row; all True where there is none.

    For responses that were sampled on past their end.
    [0, 0, 2, 42, 3, 5, 1, 0, 0] with end token 1 gives [1, 1, 1, 1, 1, 1, 1, 0, 0].
    """
    ends = torch.tensor(list(eos_ids), dtype=torch.long, device=response_ids.device)
    is_end = torch.isin(response_ids, ends)
    ends_before = is_end.long().cumsum(-1) - is_end.long()
    return ends_before == 0


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over valid tokens, in float32."""
    return zero_masked(values, mask).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over valid tokens, in float32; 0 where there are none."""
    return masked_sum(values, mask) / mask.count_nonzero().clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(values - mean) / sqrt(variance + 1e-8) over valid tokens, float32, 0 at masked places; no gradient flows through.

    The variance is unbiased (divides by count - 1). Always finite: one valid token or constant values give 0.
    """
    from megappo.algorithms.whiten_loop import whiten  # numba, which only who whitens needs

    flat = values.detach().float().cpu().contiguous().flatten()
    white = torch.empty_like(flat)
    whiten(flat.numpy(), mask.cpu().contiguous().flatten().numpy(), 1e-8, white.numpy())
    return white.view(values.shape).to(values.device)


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """Values in float32 with 0 at masked places. Unlike a product with the mask it stops NaN, and NaN gradients."""
    return torch.where(mask, values.float(), 0.0)
