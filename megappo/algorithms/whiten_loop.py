"""How are values whitened in two passes over memory? `whiten`, compiled by numba when this file is imported."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

SIGNATURE = "void(float32[::1], boolean[::1], float64, float32[::1])"


@njit(SIGNATURE, nogil=True, cache=True, fastmath={"contract", "reassoc"})  # type: ignore[untyped-decorator]
def whiten(values: Any, mask: Any, eps: float, out: Any) -> None:
    """Fill `out` (n,): (values - mean) / sqrt(variance + eps) where the mask is True, 0 elsewhere; the variance is unbiased.

    Sums are float64, of differences to the first value that counts: where values do not vary they are exactly 0."""
    anchor = 0.0
    for i in range(len(values)):
        if mask[i]:
            anchor = float(values[i])
            break
    total = squares = 0.0
    count = 0
    for i in range(len(values)):
        offset = float(values[i]) - anchor if mask[i] else 0.0
        total += offset
        squares += offset * offset
        count += 1 if mask[i] else 0
    mean = total / max(count, 1)
    variance = max(squares - total * mean, 0.0) / max(count - 1, 1)
    scale = 1.0 / np.sqrt(variance + eps)
    shift = anchor + mean
    for i in range(len(values)):
        out[i] = (float(values[i]) - shift) * scale if mask[i] else 0.0
