"""How does GAE's recursion run at the speed of memory? `scan_rows`, compiled by numba when this file is imported."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

SIGNATURE = "void(float32[:,::1], float32[:,::1], boolean[:,::1], float64, float64, float32[:,::1], float32[:,::1])"


@njit(SIGNATURE, nogil=True, cache=True, fastmath={"contract"})  # type: ignore[untyped-decorator]
def scan_rows(rewards: Any, values: Any, mask: Any, gamma: float, decay: float, advantages: Any, returns: Any) -> None:
    """Fill `advantages` and `returns` (b, r), each row from its end; decay: gamma * lambda. Masked places get 0 and are jumped
    over. What is carried along is float64: the error does not grow with the length."""
    width = rewards.shape[1]
    for i in range(rewards.shape[0]):
        row_rewards, row_values, row_mask = rewards[i], values[i], mask[i]
        row_advantages, row_returns = advantages[i], returns[i]
        next_value = advantage = 0.0
        for done in range(width):
            t = np.uint64(width - 1 - done)  # unsigned: no test for an index from the end
            if row_mask[t]:
                value = float(row_values[t])
                advantage = (row_rewards[t] + gamma * next_value - value) + decay * advantage
                next_value = value
                row_advantages[t] = advantage
                row_returns[t] = advantage + value
            else:
                row_advantages[t] = 0.0
                row_returns[t] = 0.0
