"""How are many slices copied to their places at the speed of memory? `Copies`: planned once, run many times."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

_Block = tuple[int, int, int, int, int, int]
"""Address of destination and source, bytes of a row, rows, steps of both in bytes: a row of `line_copy.copy_blocks`' table."""


class Copies:
    """Pairs of (destination, source) with equal shapes and dtypes, copied together by `run`, as long as both stay where they are.

    What is the same bytes on both sides is left alone. On a CPU a pair is a block of rows, which one compiled loop copies; what
    is no such block, and what lies on a GPU, is torch's matter. copied_bytes: what a run moves."""

    def __init__(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = [(to, of) for to, of in pairs if of.numel() and not _same_memory(to, of)]  # keeps them alive
        self.copied_bytes = sum(of.nbytes for _, of in self._pairs)
        blocks: list[_Block] = []
        self._to: list[torch.Tensor] = []
        self._of: list[torch.Tensor] = []
        for to, of in self._pairs:
            block = _block(to, of)
            if block is not None:
                blocks.append(block)
            else:
                self._to.append(to)
                self._of.append(of)
        self._table = np.array(blocks, dtype=np.int64).reshape(-1, 6)

    def run(self) -> None:
        if len(self._table):
            from megappo.pp_weights.line_copy import copy_blocks  # numba, which only who copies needs

            copy_blocks(self._table)
        if self._to:
            torch._foreach_copy_(self._to, self._of)


def _block(to: torch.Tensor, of: torch.Tensor) -> _Block | None:
    """The pair as rows of bytes that are contiguous on both sides, or None."""
    if to.dtype != of.dtype or to.shape != of.shape or to.device.type != "cpu" or of.device.type != "cpu":
        return None
    row, rows, step_to, step_of = 1, 1, 0, 0  # in elements, from the innermost dimension out
    for size, stride_to, stride_of in zip(reversed(to.shape), reversed(to.stride()), reversed(of.stride()), strict=True):
        if size == 1:
            continue
        if rows == 1 and stride_to == stride_of == row:
            row *= size
        elif rows == 1:
            rows, step_to, step_of = size, stride_to, stride_of
        elif (stride_to, stride_of) == (step_to * rows, step_of * rows):
            rows *= size
        else:
            return None
    item = to.element_size()
    return to.data_ptr(), of.data_ptr(), row * item, rows, step_to * item, step_of * item


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.stride() == other.stride()
        and one.device == other.device
    )
