"""How are scores made fit to learn from? Scaling and clipping, and DAPO's penalty on overlong responses.

legend: b samples
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RunningMoments:
    """Number, mean and sum of squared deviations of all scores so far. Three floats: part of a checkpoint."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def with_scores(self, scores: Tensor, counted: Tensor) -> RunningMoments:
        """Those of both together (Chan et al., 1979); counted (b,) bool: which scores are there at all."""
        new = scores.detach().double()[counted]
        if not new.numel():
            return self
        mean, total = float(new.mean()), self.count + new.numel()
        shift = mean - self.mean
        squares = float((new - mean).square().sum()) + shift**2 * self.count * new.numel() / total
        return RunningMoments(total, self.mean + shift * new.numel() / total, self.squares + squares)

    @property
    def std(self) -> float:
        """Unbiased; 1 where it is not known yet or nothing varies, so that dividing by it changes nothing."""
        std = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return std if std > 0 else 1.0


def shape_scores(scores: Tensor, scale: float = 1.0, clip: float | None = None, moments: RunningMoments | None = None) -> Tensor:
    """Scores (b,) float32 times `scale`, over the running standard deviation where moments are given, within +-clip.

    The mean stays: subtracting it would change which responses are rewarded (arXiv:2005.12729 divides only, too).
    """
    if clip is not None and clip <= 0:
        raise ValueError(f"scores are clipped to +-clip, which must be above 0, got {clip}")
    shaped = scores.float() * (scale / (moments.std if moments else 1.0))
    return shaped if clip is None else shaped.clamp(-clip, clip)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """What its length (b,) adds to a response's score, float32: DAPO's soft punishment (arXiv:2503.14476, equation 13).

    0                                        where length <= max_length - buffer
    (max_length - buffer - length) / buffer  up to max_length
    -1                                       beyond
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"the overlong buffer must lie in 1..max_length={max_length}, got {buffer}")
    return ((max_length - buffer - lengths.float()) / buffer).clamp(-1.0, 0.0)
