"""What are the scores of a batch of responses, and what of those that cannot be scored? The policy of `reward.on_error`."""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megappo.config.schema import RewardConfig
from megappo.errors import RunFailed
from megappo.rewards.functions import RewardFunction

_log = logging.getLogger("megappo")


@dataclass(frozen=True)
class ScoreRequest:
    """What a reward function gets, and the sample's name for messages."""

    sample: str
    prompt: str
    response: str
    answer: str | None
    row: Mapping[str, Any]


@dataclass(frozen=True)
class Scores:
    """values: one a request, in order. num_failed: how many of them are `reward.error_score` because the reward failed."""

    values: tuple[float, ...]
    num_failed: int


def score_all(function: RewardFunction, requests: Sequence[ScoreRequest], config: RewardConfig) -> Scores:
    """Score each request. A reward that raises or returns no finite number ends the run (RunFailed) with on_error=fail; with
    on_error=score it is worth `error_score`, counted and logged. It never becomes a silent zero."""
    values: list[float] = []
    num_failed = 0
    for request in requests:
        value, problem = _score(function, request)
        if problem is not None:
            what = f"reward.function={config.function!r} {problem} for {request.sample} (response {request.response!r})"
            if config.on_error == "fail":
                raise RunFailed(f"{what}; mend the function, or set reward.on_error=score to go on with reward.error_score")
            _log.warning("%s; scored %g", what, config.error_score)
            num_failed += 1
            value = config.error_score
        values.append(value)
    return Scores(tuple(values), num_failed)


def _score(function: RewardFunction, request: ScoreRequest) -> tuple[float, str | None]:
    """(score, None), or (0, what went wrong)."""
    try:
        value = function(request.prompt, request.response, request.answer, request.row)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything; the policy of `score_all` deals with it
        return 0.0, f"raised {type(error).__name__}: {error}"
    if not isinstance(value, numbers.Real):
        return 0.0, f"returned {value!r} ({type(value).__name__}), not a number,"
    if not math.isfinite(value):
        return 0.0, f"returned {float(value)}"
    return float(value), None
