"""What are the scores of a batch of responses, and what of those that have none? `Scorer`, and the policy `reward.on_error`."""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from megappo.config.schema_learning import RewardConfig
from megappo.errors import RunFailed
from megappo.rewards.call import Outcome, ScoreRequest, call_reward
from megappo.rewards.functions import BUILTIN
from megappo.rewards.parts import Part, reward_parts
from megappo.rewards.pool import RewardPool

__all__ = ["ScoreRequest", "Scorer", "Scores"]

_log = logging.getLogger("megappo")
_SHOWN = 3
"""Failures of one batch that are logged one by one; the rest is a number."""
_SHOWN_RESPONSE = 200


@dataclass(frozen=True)
class Scores:
    """One of each for each request, in order."""

    values: tuple[float, ...]
    """The scores; where the reward failed `reward.error_score`, or 0 where the sample is skipped."""
    failed: tuple[bool, ...]
    """Where a function of the reward raised, hung, ended its process or returned no finite number."""
    skipped: tuple[bool, ...]
    """Where the sample is to be left out: failed, with on_error=skip_sample."""
    parts: Mapping[str, tuple[float, ...]]
    """Each of `reward.parts`, unweighted, by name; NaN where it, or a part before it, failed. Empty without reward.parts."""

    @property
    def num_failed(self) -> int:
        return sum(self.failed)

    def mean(self) -> float:
        """Mean score of the samples that are not skipped."""
        kept = [value for value, skipped in zip(self.values, self.skipped, strict=True) if not skipped]
        return sum(kept) / len(kept)

    def joined(self, others: Scores) -> Scores:
        """These, then the others of the same run."""
        parts = {name: (*self.parts.get(name, ()), *values) for name, values in others.parts.items()}
        return Scores(self.values + others.values, self.failed + others.failed, self.skipped + others.skipped, parts)

    def part_means(self) -> dict[str, float]:
        """Mean of each part over the samples whose reward did not fail; NaN where there are none."""
        counts = [not failed for failed in self.failed]
        number = sum(counts)
        return {
            name: sum(value for value, count in zip(values, counts, strict=True) if count) / number if number else math.nan
            for name, values in self.parts.items()
        }


class Scorer:
    """The reward of a run, for as long as its worker processes live. A context manager.

    log_path: file that takes what reward code prints in the workers; None: stderr.
    Raises UserError where a function cannot be loaded."""

    def __init__(self, config: RewardConfig, log_path: Path | None = None) -> None:
        self.config = config
        self._parts = reward_parts(config)
        isolated = [part for part in self._parts if not part.in_driver]
        self._pool = RewardPool(isolated, config.workers, config.timeout_s, log_path) if isolated else None
        self._number_in_pool = {part.key: number for number, part in enumerate(isolated)}

    def score(self, requests: Sequence[ScoreRequest], may_skip_all: bool = False) -> Scores:
        """Score each request. A failed reward ends the run (RunFailed) with on_error=fail; otherwise it is counted, logged, and
        worth `error_score` or skipped. Raises RunFailed where all samples are skipped, unless that may be. A failure is never a
        silent zero."""
        totals, failed = [0.0] * len(requests), [False] * len(requests)
        columns: dict[str, tuple[float, ...]] = {}
        first = ""
        for part in self._parts:
            column = [math.nan] * len(requests)
            todo = [i for i, bad in enumerate(failed) if not bad]
            with closing(
                self._outcomes(part, requests, todo)
            ) as outcomes:  # a failure that ends the run leaves no call under way
                for i, (value, problem) in outcomes:
                    if problem is None:
                        column[i] = value
                        totals[i] += part.weight * value
                    else:
                        failed[i] = True
                        what = self._report(part, problem, requests[i], sum(failed))
                        first = first or what
            columns[part.name] = tuple(column)
        if sum(failed) > _SHOWN:
            _log.warning("the reward failed for %d of %d samples; %d are shown", sum(failed), len(failed), _SHOWN)
        skipping = self.config.on_error == "skip_sample"
        instead = 0.0 if skipping else self.config.error_score
        if skipping and failed and all(failed) and not may_skip_all:
            raise RunFailed(f"reward.on_error=skip_sample leaves none of {len(failed)} samples; the first: {first}")
        return Scores(
            values=tuple(instead if bad else total for total, bad in zip(totals, failed, strict=True)),
            failed=tuple(failed),
            skipped=tuple(skipping and bad for bad in failed),
            parts=columns if self.config.parts else {},
        )

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _outcomes(
        self, part: Part, requests: Sequence[ScoreRequest], todo: list[int]
    ) -> Generator[tuple[int, Outcome], None, None]:
        """(number of the request, outcome) of the part for the requests `todo`, as they come."""
        if part.in_driver:
            yield from ((i, call_reward(BUILTIN[part.function], requests[i])) for i in todo)
            return
        assert self._pool is not None
        yield from self._pool.run(self._number_in_pool[part.key], {i: requests[i] for i in todo})

    def _report(self, part: Part, problem: str, request: ScoreRequest, count: int) -> str:
        """End the run, or log the failure where it is one of the first of the batch. Returns what happened, in one line."""
        response = request.response
        shown = repr(response if len(response) <= _SHOWN_RESPONSE else response[:_SHOWN_RESPONSE] + "...")
        what = f"{part.shown} {problem} for {request.sample} (response {shown})"
        on_error = self.config.on_error
        if on_error == "fail":
            raise RunFailed(f"{what}; mend it, or go on without such samples with reward.on_error=skip_sample")
        if count <= _SHOWN:
            _log.warning("%s; %s", what, "skipped" if on_error == "skip_sample" else f"scored {self.config.error_score:g}")
        return what
