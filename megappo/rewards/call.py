"""What came of one call of a reward function? A finite number, or what went wrong, in words."""

from __future__ import annotations

import math
import numbers
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megappo.rewards.functions import RewardFunction

_LONGEST_TEXT = 300


@dataclass(frozen=True)
class ScoreRequest:
    """What a reward function gets, and the sample's name for messages."""

    sample: str
    prompt: str
    response: str
    answer: str | None
    row: Mapping[str, Any]


class Outcome(NamedTuple):
    """value where problem is None. A problem reads on from the function's name: `raised KeyError: 'x'`."""

    value: float
    problem: str | None = None


def call_reward(function: RewardFunction, request: ScoreRequest) -> Outcome:
    """Call the function on one sample. Whatever it raises or returns becomes an Outcome."""
    try:
        value = function(request.prompt, request.response, request.answer, request.row)
        if not isinstance(value, numbers.Real):
            return failed(f"returned {value!r} ({type(value).__name__}), not a number,")
        number = float(value)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything; `reward.on_error` deals with it
        return raised(error)
    return Outcome(number) if math.isfinite(number) else failed(f"returned {number}")


def raised(error: BaseException) -> Outcome:
    """What a function raised, and where."""
    return failed(f"raised {type(error).__name__}: {error}{_place(error)}")


def failed(problem: str) -> Outcome:
    """A failure, its description on one line of bounded length."""
    return Outcome(0.0, shortened(problem))


def shortened(text: str) -> str:
    """One line of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_TEXT else f"{line[:_LONGEST_TEXT]}..."


def _place(error: BaseException) -> str:
    """` (mine.py line 3)`: where it was raised; nothing for what the function's own frame is not part of."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name} line {frames[-1].lineno})" if len(frames) > 1 else ""
