"""What came of the run? The last lines that it prints. No torch."""

from __future__ import annotations

from collections.abc import Sequence

ENDS = 5
"""Steps at either end of the run that the mean reward is taken over."""


def summary_lines(
    rewards: Sequence[float], accuracy_before: float | None = None, accuracy_after: float | None = None
) -> list[str]:
    """`mean reward: 0.16 -> 0.45` (first 5 steps -> last 5), then, where it was measured, `held-out accuracy: 0.41 -> 0.93`.

    rewards: `reward/mean` of each step. With fewer than 10 steps the two ends are the two halves.
    """
    lines = []
    if rewards:
        n = max(1, min(ENDS, len(rewards) // 2))
        lines.append(f"mean reward: {_mean(rewards[:n]):.2f} -> {_mean(rewards[-n:]):.2f}")
    if accuracy_before is not None and accuracy_after is not None:
        lines.append(f"held-out accuracy: {accuracy_before:.2f} -> {accuracy_after:.2f}")
    return lines


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
