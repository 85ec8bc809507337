"""What are the log-probs of labels, and the entropies, of hidden states? The output layer and its softmax, tile by tile.

The logits never exist as a whole, forward or backward: a tile of them is multiplied, used and overwritten. The backward pass
multiplies it again, so that both passes take four matmuls of the plain path's size where that takes three.

legend: n tokens, h hidden size, V vocabulary, t tensor-parallel degree, x a tile of logits
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megappo.models.softmax_blocks import RowResult, SoftmaxSums, working_dtype, write_gradient
from megappo.models.vocab_parallel import Columns, VocabularyShard, empty_like

_TILE_ROWS = {"cpu": 1024, "cuda": 4096}
_TILE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 24}  # large enough for a matmul at full speed
_CHUNK = 1 << 21  # elements of a tile that torch takes at a time


def log_probs_and_entropy_from_hidden(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary: VocabularyShard, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`vocab_parallel_log_probs_and_entropy` of logits = hidden @ weight.T, rounded to their dtype, which are never held.

    hidden: (..., h), the same on every rank of the group. weight: (padded V / t, h), this rank's rows of the output layer; same
    dtype. Padded rows are never multiplied. The rest as there. Differentiable in hidden, whose gradient is summed over the group,
    and in weight.
    """
    log_probs, entropy = _apply(hidden, weight, labels, vocabulary, temperature, True)
    assert entropy is not None
    return log_probs, entropy


def log_probs_from_hidden(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary: VocabularyShard, *, temperature: float = 1.0
) -> Tensor:
    """Log-prob of each label alone, (...): as above, for where nobody looks at the entropy."""
    return _apply(hidden, weight, labels, vocabulary, temperature, False)[0]


def _apply(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary: VocabularyShard, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    columns = Columns(weight.shape[0], vocabulary)
    columns.check(hidden, labels, temperature)
    if hidden.dtype != weight.dtype or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} of {hidden.dtype} does not fit weight {tuple(weight.shape)} of {weight.dtype}"
        )
    rows = hidden.reshape(-1, hidden.shape[-1])
    apply: Any = _LogProbsFromHidden.apply
    log_probs, entropy = apply(rows, weight, labels.reshape(-1), columns, temperature, with_entropy)
    return log_probs.reshape(labels.shape), None if entropy is None else entropy.reshape(labels.shape)


class _LogProbsFromHidden(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, columns: Columns, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        local = columns.local(labels)
        sums = SoftmaxSums(len(labels), hidden, temperature, with_entropy, _CHUNK)
        tiles = _Tiles(hidden, weight, columns.width)
        for vocabulary in tiles.vocabulary:
            for rows in tiles.rows:
                sums.add(tiles.logits(rows, vocabulary), local[rows] - vocabulary.start, rows.start)
        log_probs, result = sums.result(columns.mine(labels), columns.group)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, local, result.maximum, result.log_sum, result.entropy)
        ctx.columns, ctx.temperature = columns, temperature
        return columns.only_known(log_probs, labels), result.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local, maximum, log_sum, entropy = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        result = RowResult(maximum, log_sum, entropy)
        sum_dtype = working_dtype(hidden.dtype)  # many products are added up: not in half precision
        grad_hidden = torch.zeros(hidden.shape, dtype=sum_dtype, device=hidden.device) if wants_hidden else None
        grad_weight = empty_like(weight) if wants_weight else None
        tiles = _Tiles(hidden, weight, ctx.columns.width)
        for vocabulary in tiles.vocabulary:
            weight_sum = torch.zeros(0, dtype=sum_dtype)
            if grad_weight is not None:
                in_place = grad_weight[vocabulary]
                weight_sum = in_place.zero_() if weight.dtype == sum_dtype else torch.zeros_like(in_place, dtype=sum_dtype)
            for rows in tiles.rows:
                x = tiles.logits(rows, vocabulary)
                g, g_entropy = (None if grad is None else grad[rows] for grad in (grad_log_probs, grad_entropy))
                write_gradient(x, x, local[rows] - vocabulary.start, result.of(rows), ctx.temperature, g, g_entropy, _CHUNK)
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], x, weight[vocabulary])
                if grad_weight is not None:
                    _add_product(weight_sum, x.T, hidden[rows])
            if grad_weight is not None and weight.dtype != sum_dtype:
                grad_weight[vocabulary] = weight_sum
        if grad_weight is not None:
            grad_weight[ctx.columns.width :] = 0
        if grad_hidden is not None:
            if ctx.columns.group is not None:
                dist.all_reduce(grad_hidden, group=ctx.columns.group)
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None


class _Tiles:
    """One piece of memory that each tile of logits is multiplied into."""

    def __init__(self, hidden: Tensor, weight: Tensor, width: int) -> None:
        self._hidden, self._weight = hidden, weight
        kind = "cpu" if hidden.device.type == "cpu" else "cuda"
        num_rows = max(1, min(len(hidden), _TILE_ROWS[kind]))
        num_columns = max(1, min(width, _TILE_ELEMENTS[kind] // num_rows))
        self.rows = _slices(len(hidden), num_rows)
        self.vocabulary = _slices(width, num_columns)
        self._memory = hidden.new_empty(num_rows * num_columns)

    def logits(self, rows: slice, vocabulary: slice) -> Tensor:
        shape = (rows.stop - rows.start, vocabulary.stop - vocabulary.start)
        x = self._memory[: shape[0] * shape[1]].view(shape)
        return torch.mm(self._hidden[rows], self._weight[vocabulary].T, out=x)


def _slices(total: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, total)) for i in range(0, total, step)]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
