"""How likely is it that one of k samples passes? `pass_at_k`, the unbiased estimate. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k of the n samples, drawn without putting back, hold one of the c that passed
    (arXiv:2107.03374, equation 1). Needs 1 <= k <= n and 0 <= c <= n."""
    if not 1 <= k <= num_samples or not 0 <= num_passed <= num_samples:
        raise ValueError(f"pass@{k} of {num_samples} samples, {num_passed} of them passed: k must lie in 1..{num_samples}")
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def ks_up_to(num_samples: int) -> Sequence[int]:
    """1, 2, 4, ... below num_samples, and num_samples."""
    return [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples] + [num_samples] * (num_samples > 0)
