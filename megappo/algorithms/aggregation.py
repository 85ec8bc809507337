"""What is the loss of a batch a mean of? `loss_weights`: a weight a token, and the share of each token in the one divisor.

legend: b samples, r response width; masks are bool, True on valid tokens
loss = sum of weight * token loss / sum of share, both sums over the whole optimizer batch: all micro-batches, all data-parallel
ranks. Weight and share of a token depend on its own row only, so no split of the batch changes the result, nor does padding.
A row without valid tokens counts nowhere.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

Aggregation = Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length"]


class LossWeights(NamedTuple):
    weight: Tensor
    """(b, r) float32: factor of each token's loss; 0 at masked places."""
    share: Tensor
    """(b, r) int64: what each token adds to the divisor; an integer, as Megatron's schedule wants its token count."""


def loss_weights(response_mask: Tensor, mode: Aggregation, constant_length: int | None = None) -> LossWeights:
    """Columns of the batch for one of these means, with l token losses, |y| valid tokens of a row, n rows that have one:

    token_mean           sum of l / number of valid tokens      (DAPO, arXiv:2503.14476, equation 12)
    seq_mean_token_sum   sum of l / n
    seq_mean_token_mean  sum of (l / |y|) / n                   (GRPO, arXiv:2402.03300, equation 3)
    constant_length      sum of l / (n * constant_length)       (Dr. GRPO, arXiv:2503.20783: no bias towards long answers)
    """
    if (constant_length is not None) != (mode == "constant_length") or (constant_length is not None and constant_length < 1):
        raise ValueError(f"constant_length goes with the mode of that name and is at least 1; got {constant_length} with {mode}")
    valid = response_mask.float()
    if mode == "token_mean":
        return LossWeights(valid, response_mask.long())
    # A row is counted once, at its first valid token: integers add up exactly, thirds would not.
    first = (response_mask & (response_mask.long().cumsum(-1) == 1)).long()
    if mode == "seq_mean_token_mean":
        return LossWeights(valid / response_mask.sum(-1, keepdim=True).clamp(min=1), first)
    return LossWeights(valid, first * (constant_length or 1))
