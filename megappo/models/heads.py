"""What does a model's last stage compute? Vocabulary-parallel log-probs and entropy; a scalar value.

legend: n scored tokens, V vocabulary, t tensor-parallel degree, h hidden size
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

_CHUNK_ELEMENTS = 1 << 22  # float32 elements of the largest temporary: 16 MiB


class _LogProbsAndEntropy(torch.autograd.Function):
    """log-softmax at the labels, and the entropy, over logits that are cut along the vocabulary.

    With z = logits / T, lse = log sum exp z, p = exp(z - lse):
      log p(label) = z[label] - lse          d / dz = onehot(label) - p
      H = lse - sum p z                      d / dz = -p (log p + H)
    Softmax is never kept: the backward pass recomputes it chunk by chunk from the logits and lse.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, temperature: float, first: int, group: Any) -> tuple[Tensor, Tensor]:
        n, width = logits.shape
        maximum = logits.new_full((n,), float("-inf"), dtype=torch.float32)
        if width:
            maximum = logits.amax(dim=1).float() / temperature
        if group is not None:
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
        sums = torch.zeros(3, n, dtype=torch.float32, device=logits.device)  # exp, exp * z, z at the label
        for rows in _chunks(n, width):
            z = logits[rows].float() / temperature
            shifted = (z - maximum[rows, None]).exp_()
            sums[0, rows] = shifted.sum(dim=1)
            sums[1, rows] = (shifted * z).sum(dim=1)
            local = labels[rows] - first
            mine = (local >= 0) & (local < width)
            if width:
                at_label = z.gather(1, local.clamp(0, width - 1)[:, None]).squeeze(1)
                sums[2, rows] = torch.where(mine, at_label, torch.zeros_like(at_label))
        if group is not None:
            dist.all_reduce(sums, group=group)
        lse = maximum + sums[0].log()
        entropy = lse - sums[1] / sums[0]
        ctx.save_for_backward(logits, labels, lse, entropy)
        ctx.temperature, ctx.first = temperature, first
        return sums[2] - lse, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, lse, entropy = ctx.saved_tensors
        n, width = logits.shape
        grad = torch.empty_like(logits)
        for rows in _chunks(n, width):
            log_p = logits[rows].float() / ctx.temperature - lse[rows, None]
            p = log_p.exp()
            chunk = p * -(grad_log_prob[rows, None] + grad_entropy[rows, None] * (log_p + entropy[rows, None]))
            local = labels[rows] - ctx.first
            mine = ((local >= 0) & (local < width)).nonzero().squeeze(1)
            chunk[mine, local[mine]] += grad_log_prob[rows][mine]
            grad[rows] = (chunk / ctx.temperature).to(grad.dtype)
        return grad, None, None, None, None


def _chunks(n: int, width: int) -> list[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, width))
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]


def vocab_parallel_log_probs_and_entropy(
    logits: Tensor, labels: Tensor, *, vocab_size: int, temperature: float = 1.0, tp_rank: int = 0, tp_group: Any = None
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of each distribution, at the given temperature.

    logits: (n, padded V / t), this rank's columns of the padded vocabulary, any float dtype; not changed.
    labels: (n,) int64. vocab_size: V without padding; padded columns never count.
    tp_group: process group that holds the other columns; None for the whole vocabulary on one rank.
    Returns log_probs (n,) and entropy (n,), float32, the same on every rank of the group; differentiable.
    """
    first = tp_rank * logits.shape[1]
    width = max(0, min(logits.shape[1], vocab_size - first))
    apply: Any = _LogProbsAndEntropy.apply
    out: tuple[Tensor, Tensor] = apply(logits[:, :width], labels, temperature, first, tp_group)
    return out


class ValueHead(nn.Module):
    """One scalar a token. `weight` is (1, h) as in Hugging Face's `score`; float32, replicated over tp."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=torch.float32))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (n, h) -> values (n,) float32."""
        return nn.functional.linear(hidden.float(), self.weight).squeeze(-1)
