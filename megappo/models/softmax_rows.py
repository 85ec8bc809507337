"""How are rows of logits summed, and their gradient written, at the speed of memory on a CPU? Loops that numba compiles.

Imported only where logits lie in host memory. Each row is read once, in blocks that stay in the first cache, and nothing but a
few numbers a row is stored. Rows come as one flat array with a step, float32 or the bits of bfloat16 as int16.
The arithmetic is IEEE's but for the order of sums: NaN and infinities go where they would in torch.

legend: n rows, width columns that count, x logits, m the row's greatest x, T temperature (inverse_t: float32), z = (x - m) / T
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

_BLOCK = 2048
# Called as functions of their own, these would be vectorized once for the process that compiles them and once more for the cache,
# and results would differ in their last bits between the first run and the next.
_CONTRACTED: dict[str, Any] = {"fastmath": {"contract"}, "forceinline": True}
_SUMS: dict[str, Any] = {  # taken in any order, so that they fit vector registers
    "fastmath": {"reassoc", "contract", "nsz"},
    "forceinline": True,
}

_LOWEST, _HIGHEST = np.float32(-88.0), np.float32(88.0)  # at the lower one _exp is 0, as all below in torch nearly are
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440054690583e-4)
# exp(r) = 1 + r + r^2 (p0 + p1 r + ...) on |r| <= ln(2) / 2: the p whose greatest relative error, 3e-9, is least.
_P0, _P1, _P2 = np.float32(0.499999934477), np.float32(0.166665206305), np.float32(0.041668388058)
_P3, _P4 = np.float32(0.008368717017), np.float32(0.001381459848)


@njit  # type: ignore[untyped-decorator]
def _bits(value: Any) -> Any:
    return np.float32(value).view(np.int32)


@njit  # type: ignore[untyped-decorator]
def _float(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@njit(**_CONTRACTED)  # type: ignore[untyped-decorator]
def _exp(z: Any) -> Any:
    """e^z to 2 ulp for z from _LOWEST to _HIGHEST, 0 where it is no normal number. NaN stays NaN."""
    power = np.floor(z * _LOG2_E + np.float32(0.5))
    r = z - power * _LN2_HIGH
    r = r - power * _LN2_LOW
    series = (((_P4 * r + _P3) * r + _P2) * r + _P1) * r + _P0
    series = series * (r * r) + (r + np.float32(1.0))
    return series * _float((np.int32(power) + np.int32(127)) << np.int32(23))


@njit  # type: ignore[untyped-decorator]
def _within(z: Any) -> Any:
    """z, or the end of the range that _exp knows. Comparisons with NaN are false: it passes."""
    z = _LOWEST if z < _LOWEST else z
    return _HIGHEST if z > _HIGHEST else z


def _read(stored: Any) -> Any: ...


@overload(_read, strict=False)  # type: ignore[untyped-decorator]
def _read_any(stored: Any) -> Any:
    if isinstance(stored, types.Float):
        return lambda stored: stored
    return lambda stored: _float(np.int32(stored) << np.int32(16))


def _write(row: Any, at: Any, value: Any) -> Any: ...


@overload(_write, strict=False)  # type: ignore[untyped-decorator]
def _write_any(row: Any, at: Any, value: Any) -> Any:
    if isinstance(row.dtype, types.Float):

        def write(row: Any, at: Any, value: Any) -> None:
            row[at] = value

    else:

        def write(row: Any, at: Any, value: Any) -> None:
            bits = _bits(value)
            even = np.int32((bits >> np.int32(16)) & np.int32(1))
            row[at] = np.int16(np.int32(bits + np.int32(0x7FFF) + even) >> np.int32(16))

    return write


@njit  # type: ignore[untyped-decorator]
def _greatest(block: Any) -> Any:
    """The greatest of a block. Floats ordered as integers: any machine compares those by the vector, with NaN above all."""
    best = np.int32(-0x80000000)
    for j in range(block.shape[0]):
        bits = _bits(_read(block[j]))
        bits = np.int32(bits ^ np.int32((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
        best = max(best, bits)
    return _float(best ^ np.int32((best >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(**_SUMS)  # type: ignore[untyped-decorator]
def _block_sums(block: Any, m: Any, inverse_t: Any) -> Any:
    """sum exp z and sum z exp z"""
    exps, weighted = np.float32(0.0), np.float32(0.0)
    for j in range(block.shape[0]):
        z = _within((_read(block[j]) - m) * inverse_t)
        e = _exp(z)
        exps += e
        weighted += e * z
    return exps, weighted


@njit(**_SUMS)  # type: ignore[untyped-decorator]
def _block_exps(block: Any, m: Any, inverse_t: Any) -> Any:
    """sum exp z"""
    exps = np.float32(0.0)
    for j in range(block.shape[0]):
        exps += _exp(_within((_read(block[j]) - m) * inverse_t))
    return exps


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def add_columns(x: Any, step: int, width: int, inverse_t: Any, entropy: bool, sums: Any) -> None:
    """Take more columns into sums (3, n): m, sum exp z, sum z exp z (left alone where entropy is False)."""
    infinite = np.float32(-np.inf)
    for i in range(sums.shape[1]):
        row = x[i * step : i * step + width]
        m, exps, weighted = sums[0, i], sums[1, i], sums[2, i]
        for start in range(0, width, _BLOCK):
            block = row[start : min(start + _BLOCK, width)]
            best = _greatest(block)
            if best == infinite:
                continue  # probability 0 each
            if best > m:
                if m > infinite:
                    down = (m - best) * inverse_t
                    weighted = (weighted + exps * down) * np.exp(down)
                    exps *= np.exp(down)
                m = best
            if entropy:
                more, more_weighted = _block_sums(block, m, inverse_t)
                weighted += more_weighted
            else:
                more = _block_exps(block, m, inverse_t)
            exps += more
        sums[0, i], sums[1, i], sums[2, i] = m, exps, weighted


@njit(**_CONTRACTED)  # type: ignore[untyped-decorator]
def _block_gradient(block: Any, out: Any, m: Any, log_sum: Any, inverse_t: Any, g: Any) -> None:
    scale = -g * inverse_t
    for j in range(block.shape[0]):
        _write(out, j, _exp(_within((block[j] - m) * inverse_t - log_sum)) * scale)


@njit(**_CONTRACTED)  # type: ignore[untyped-decorator]
def _block_gradient_of_both(
    block: Any, out: Any, m: Any, log_sum: Any, inverse_t: Any, g: Any, g_entropy: Any, entropy: Any
) -> None:
    scale, slope = -(g + g_entropy * entropy) * inverse_t, -g_entropy * inverse_t
    for j in range(block.shape[0]):
        log_p = _within((block[j] - m) * inverse_t - log_sum)
        _write(out, j, _exp(log_p) * (scale + slope * log_p))


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def write_gradient(
    x: Any, step: int, out: Any, out_step: int, width: int, labels: Any, inverse_t: Any, rows: Any, with_entropy: bool
) -> None:
    """d loss / d x into out, which may be x. rows (5, n): m, log sum exp z, d loss / d log p, d loss / d H, H (the last two
    are read with_entropy); labels (n,), -1 where the label is none of these columns."""
    copied = np.empty(_BLOCK, dtype=np.float32)  # what is read and written apart fits vector registers
    for i in range(rows.shape[1]):
        m, log_sum, g, g_entropy, entropy = rows[0, i], rows[1, i], rows[2, i], rows[3, i], rows[4, i]
        row, to, label = x[i * step : i * step + width], out[i * out_step : i * out_step + width], labels[i]
        for start in range(0, width, _BLOCK):
            end = min(start + _BLOCK, width)
            stored, block, block_out = row[start:end], copied[: end - start], to[start:end]
            for j in range(block.shape[0]):
                block[j] = _read(stored[j])
            if with_entropy:
                _block_gradient_of_both(block, block_out, m, log_sum, inverse_t, g, g_entropy, entropy)
            else:
                _block_gradient(block, block_out, m, log_sum, inverse_t, g)
            if start <= label < end:
                log_p = _within((block[label - start] - m) * inverse_t - log_sum)
                others = g_entropy * (log_p + entropy) if with_entropy else np.float32(0.0)
                _write(to, label, (g - _exp(log_p) * (g + others)) * inverse_t)
