"""What are the log-probs of labels, and the entropies, of logits cut along the vocabulary? A pass that keeps no softmax.

legend: n tokens, V vocabulary, t tensor-parallel degree
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megappo.models.softmax_blocks import RowResult, SoftmaxSums, write_gradient

_CHUNK_SHARE = 0.007
_SMALLEST_CHUNK, _LARGEST_CHUNK = 1 << 15, 1 << 22


@dataclass(frozen=True)
class VocabularyShard:
    """Whose columns a rank holds, of a vocabulary that is padded and cut evenly over a group."""

    vocab_size: int
    """V without padding; what stands in padded columns never counts"""
    tp_rank: int = 0
    tp_group: Any = None
    """process group that holds the other columns, whose ranks all call; None for the whole vocabulary on one rank"""


def vocab_parallel_log_probs_and_entropy(
    logits: Tensor,
    labels: Tensor,
    vocabulary: VocabularyShard,
    *,
    temperature: float = 1.0,
    overwrite_logits: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy of each distribution, at the given temperature.

    logits: (..., padded V / t), this rank's columns of the padded vocabulary, any float dtype; not changed.
    labels: (...) int64; a label outside the vocabulary has the log-prob NaN.
    overwrite_logits: the backward pass writes the gradient where the logits are, which nobody may read or need for a gradient of
      their own afterwards. Else it takes new memory. Nothing else here is as large as one percent of large logits.
    Returns log_probs and entropy, both (...), float32 (float64 of float64), the same on every rank of the group; differentiable.
    """
    log_probs, entropy = _apply(logits, labels, vocabulary, temperature, overwrite_logits, True)
    assert entropy is not None
    return log_probs, entropy


def vocab_parallel_log_probs_from_logits(
    logits: Tensor,
    labels: Tensor,
    vocabulary: VocabularyShard,
    *,
    temperature: float = 1.0,
    overwrite_logits: bool = False,
) -> Tensor:
    """Log-prob of each label alone, (...): as above, for where nobody looks at the entropy."""
    return _apply(logits, labels, vocabulary, temperature, overwrite_logits, False)[0]


class Columns:
    """Which part of the vocabulary this rank holds: `width` columns from `first` on, behind which padding may stand."""

    def __init__(self, size: int, vocabulary: VocabularyShard) -> None:
        self.vocab_size = vocabulary.vocab_size
        self.group = vocabulary.tp_group
        self.first = vocabulary.tp_rank * size
        self.width = max(0, min(size, self.vocab_size - self.first))

    def check(self, x: Tensor, labels: Tensor, temperature: float) -> None:
        if x.shape[:-1] != labels.shape:
            raise ValueError(f"{tuple(x.shape)} need labels {tuple(x.shape[:-1])}, not {tuple(labels.shape)}")
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} has no log-probs; give one above 0")

    def local(self, labels: Tensor) -> Tensor:
        """The label's column here, outside 0..width-1 where another rank has it."""
        return labels - self.first

    def mine(self, labels: Tensor) -> Tensor:
        return (labels >= self.first) & (labels < self.first + self.width)

    def only_known(self, log_probs: Tensor, labels: Tensor) -> Tensor:
        """NaN where the label is none of the vocabulary: no rank found it, which nobody would see."""
        return log_probs.masked_fill((labels < 0) | (labels >= self.vocab_size), torch.nan)


def _apply(
    logits: Tensor, labels: Tensor, vocabulary: VocabularyShard, temperature: float, overwrite: bool, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    columns = Columns(logits.shape[-1], vocabulary)
    columns.check(logits, labels, temperature)
    rows = logits.reshape(-1, logits.shape[-1])
    apply: Any = _LogProbs.apply
    log_probs, entropy = apply(rows, labels.reshape(-1), columns, temperature, overwrite, with_entropy)
    return log_probs.reshape(labels.shape), None if entropy is None else entropy.reshape(labels.shape)


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, columns: Columns, temperature: float, overwrite: bool, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        local = columns.local(labels)
        sums = SoftmaxSums(len(labels), logits, temperature, with_entropy, _chunk(logits))
        sums.add(logits[:, : columns.width], local)
        log_probs, result = sums.result(columns.mine(labels), columns.group)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, local, result.maximum, result.log_sum, result.entropy)
        ctx.width, ctx.temperature, ctx.overwrite = columns.width, temperature, overwrite
        return columns.only_known(log_probs, labels), result.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.overwrite is None:
            raise RuntimeError("the logits were overwritten by the first backward pass; a second needs overwrite_logits=False")
        logits, local, maximum, log_sum, entropy = ctx.saved_tensors
        if ctx.overwrite:
            grad, ctx.overwrite = logits.detach(), None
        else:
            grad = empty_like(logits)
        width = ctx.width
        result = RowResult(maximum, log_sum, entropy)
        x, out = logits[:, :width], grad[:, :width]
        write_gradient(x, out, local, result, ctx.temperature, grad_log_probs, grad_entropy, _chunk(logits))
        grad[:, width:] = 0
        return grad, None, None, None, None, None


def _chunk(logits: Tensor) -> int:
    """Elements of a float32 temporary, of which there are three: together under 5 % of large logits, also of half precision."""
    return min(max(int(logits.numel() * _CHUNK_SHARE), _SMALLEST_CHUNK), _LARGEST_CHUNK)


def empty_like(x: Tensor) -> Tensor:
    """New memory of x's shape. On a CPU from numpy, which asks Linux for large pages: touched first in a quarter of the time."""
    if x.device.type != "cpu" or not x.numel():
        return torch.empty_like(x)
    return torch.from_numpy(np.empty(x.numel() * x.itemsize, dtype=np.uint8)).view(x.dtype).view(x.shape)
