"""How does a softmax over many columns take them block by block? `SoftmaxSums`, and the gradient of a block from its result.

legend: n rows, w columns of a block, x logits, m a row's greatest x, T temperature, z = (x - m) / T, p softmax, H entropy
  log p = z - log sum exp z        H = log sum exp z - (sum z exp z) / (sum exp z): both terms positive, nothing cancels
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class RowResult:
    """What the gradient of every block needs, a number a row."""

    maximum: Tensor
    """(n,) m over all columns of all ranks"""
    log_sum: Tensor
    """(n,) log sum exp z"""
    entropy: Tensor | None
    """(n,) H, where asked for"""

    def of(self, rows: slice) -> RowResult:
        return RowResult(self.maximum[rows], self.log_sum[rows], None if self.entropy is None else self.entropy[rows])


class SoftmaxSums:
    """Running sums of n rows. Blocks come in any order; what was summed is brought down whenever a greater x comes."""

    def __init__(self, n: int, like: Tensor, temperature: float, entropy: bool, chunk: int) -> None:
        """like: of the blocks' dtype and device. chunk: elements that torch may take at a time, in three temporaries."""
        self.temperature = temperature
        self.entropy = entropy
        self.chunk = chunk
        self._sums = torch.zeros(3, n, dtype=working_dtype(like.dtype), device=like.device)  # m, exp z, z exp z
        self._sums[0] = -torch.inf
        self._at_label = torch.zeros(n, dtype=self._sums.dtype, device=like.device)

    def add(self, block: Tensor, labels: Tensor, first_row: int = 0) -> None:
        """Take a block (rows, w) of columns. labels: (rows,) column in the block, outside 0..w-1: not in it."""
        rows, width = block.shape
        if not block.numel():
            return
        sums = self._sums[:, first_row : first_row + rows]
        if _compiled(block):
            from megappo.models import softmax_rows

            flat, own = _flat(block), sums.contiguous()
            softmax_rows.add_columns(flat, block.stride(0), width, np.float32(1.0 / self.temperature), self.entropy, own.numpy())
            sums.copy_(own)
        else:
            for part in _chunks(rows, width, self.chunk):
                self._add_with_torch(block[part], sums[:, part])
        mine = (labels >= 0) & (labels < width)
        at_label = block.gather(1, labels.clamp(0, width - 1)[:, None]).squeeze(1)
        self._at_label[first_row : first_row + rows] += at_label.masked_fill(~mine, 0)

    def _add_with_torch(self, block: Tensor, sums: Tensor) -> None:
        m, exps, weighted = sums.unbind()
        x = block.to(m.dtype)
        best = torch.maximum(m, x.amax(dim=1))
        down = (m - best) / self.temperature
        was_empty = m == -torch.inf
        factor = down.exp().masked_fill_(was_empty, 0)
        z = _scaled(x, best, self.temperature)
        e = z.exp()
        if self.entropy:
            weighted.add_(exps * down).mul_(factor).masked_fill_(was_empty, 0).add_(z.mul_(e).sum(dim=1))
        # A block of -inf alone adds nothing; only z of it is NaN.
        nothing = best == -torch.inf
        exps.mul_(factor).add_(e.sum(dim=1).masked_fill_(nothing, 0))
        if self.entropy:
            weighted.masked_fill_(nothing, 0)
        m.copy_(best)

    def result(self, mine: Tensor, group: Any) -> tuple[Tensor, RowResult]:
        """log p at the labels, (n,), and what the gradient needs: over all ranks of the group, the same on each.

        mine: (n,) whether the label is a column of this rank. All ranks of the group call."""
        m, exps, weighted = self._sums.unbind()
        if group is not None:
            own, m = m, m.clone()
            dist.all_reduce(m, op=dist.ReduceOp.MAX, group=group)
            down = (own - m) / self.temperature
            has_some = own > -torch.inf
            weighted = torch.where(has_some, (weighted + exps * down) * down.exp(), weighted)
            exps = torch.where(has_some, exps * down.exp(), exps)
        at_label = ((self._at_label - m) / self.temperature).masked_fill(~mine, 0)
        if group is not None:
            sums = torch.stack([exps, at_label, *([weighted] if self.entropy else [])])
            dist.all_reduce(sums, group=group)
            exps, at_label = sums[0], sums[1]
            weighted = sums[2] if self.entropy else weighted
        log_sum = exps.log()
        return at_label - log_sum, RowResult(m, log_sum, log_sum - weighted / exps if self.entropy else None)


def write_gradient(
    block: Tensor,
    out: Tensor,
    labels: Tensor,
    result: RowResult,
    temperature: float,
    grad_log_probs: Tensor | None,
    grad_entropy: Tensor | None,
    chunk: int,
) -> None:
    """d loss / d block into `out` (rows, w), which may be the block itself. labels as for `add`; the others (rows,).

    d log p[label] / dz = onehot(label) - p      d H / dz = -p (log p + H)
    """
    rows, width = block.shape
    if not block.numel():
        return
    if grad_log_probs is None:
        grad_log_probs = torch.zeros_like(result.log_sum)
    if _compiled(block) and _compiled(out):
        from megappo.models import softmax_rows

        zeros = torch.zeros_like(result.log_sum)
        entropy = [zeros, zeros] if grad_entropy is None else [grad_entropy, result.entropy]
        numbers = torch.stack([result.maximum, result.log_sum, grad_log_probs, *entropy]).numpy()
        here = torch.where((labels >= 0) & (labels < width), labels, -1).numpy()
        softmax_rows.write_gradient(
            *(_flat(block), block.stride(0), _flat(out), out.stride(0), width),
            *(here, np.float32(1.0 / temperature), numbers, grad_entropy is not None),
        )
        return
    for part in _chunks(rows, width, chunk):
        x = block[part].to(result.maximum.dtype)
        log_p = _scaled(x, result.maximum[part], temperature, result.log_sum[part])
        p = log_p.exp()
        g = grad_log_probs[part]
        if grad_entropy is None:
            p *= -g[:, None]
        else:
            assert result.entropy is not None
            h = grad_entropy[part]
            p *= log_p.mul_(-h[:, None]).sub_((g + h * result.entropy[part])[:, None])
        local = labels[part]
        mine = (local >= 0) & (local < width)
        p.scatter_add_(1, local.clamp(0, width - 1)[:, None], g.masked_fill(~mine, 0)[:, None])
        out[part] = p.div_(temperature)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, and float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def _scaled(x: Tensor, m: Tensor, temperature: float, log_sum: Tensor | None = None) -> Tensor:
    z = x.sub(m[:, None]).div_(temperature)
    if log_sum is not None:
        z -= log_sum[:, None]
    limits = torch.finfo(z.dtype)
    return z.clamp_(min=math.log(limits.tiny) + math.log(limits.eps) - 1)  # exp of it is 0; -inf would make 0 * z NaN


def _compiled(block: Tensor) -> bool:
    """Whether numba's loops take it."""
    return block.device.type == "cpu" and block.dtype in (torch.float32, torch.bfloat16) and block.stride(1) == 1


def _flat(block: Tensor) -> Any:
    """The block's memory from its first to its last element as one array; bfloat16 as int16."""
    n, width = block.shape
    flat = block.detach().as_strided(((n - 1) * block.stride(0) + width,), (1,))
    return (flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat).numpy()


def _chunks(rows: int, width: int, elements: int) -> list[slice]:
    step = max(1, elements // width)
    return [slice(i, min(i + step, rows)) for i in range(0, rows, step)]
