"""What is the learning rate at a step? `lr_at`, as Megatron's scheduler gives it. Pure Python."""

from __future__ import annotations

import math
from typing import Literal


def lr_at(
    step: int,
    *,
    lr: float,
    min_lr: float,
    warmup_steps: int,
    decay_steps: int,
    decay: Literal["constant", "linear", "cosine"],
) -> float:
    """Learning rate of a step >= 0: from 0 to `lr` over the warm-up, then along the decay to `min_lr` at decay_steps, and
    `min_lr` from there on: the cosine (arXiv:1608.03983, without restarts) does not rise again. `constant` stays at `lr`."""
    if step < 0 or warmup_steps < 0 or (decay != "constant" and decay_steps <= warmup_steps):
        raise ValueError(
            f"step {step} and warm-up {warmup_steps} must be at least 0, the decay's end {decay_steps} behind the warm-up"
        )
    if warmup_steps and step <= warmup_steps:
        return lr * step / warmup_steps
    if decay == "constant":
        return lr
    done = min((step - warmup_steps) / (decay_steps - warmup_steps), 1.0)
    return min_lr + (lr - min_lr) * (1 - done if decay == "linear" else (1 + math.cos(math.pi * done)) / 2)
