"""How far is the run? `Progress`: a bar on a terminal, one line a step elsewhere. No torch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import SupportsFloat, TextIO

from tqdm import tqdm

log = logging.getLogger("megappo")

_SHOWN = (  # key, label, format
    ("loss", "loss", ".4f"),
    ("accuracy", "accuracy", ".3f"),
    ("reward/mean", "reward", ".3f"),
    ("rollout/response_length_mean", "length", ".1f"),
    ("actor/entropy", "entropy", ".3f"),
    ("actor/approx_kl", "kl", ".5f"),
    ("rollout/logprob_diff_max", "logprob diff", ".1e"),
    ("validation/accuracy", "held-out", ".3f"),
    ("timing_s/step", "s/step", ".2f"),
)


def step_line(step: int, num_steps: int, metrics: Mapping[str, SupportsFloat]) -> str:
    """`step 3/100  reward 0.160  length 4.0 ...`: the metrics that people watch, where they are measured."""
    return "  ".join([f"step {step}/{num_steps}", *_parts(metrics)])


class Progress:
    """Shows each step once. Use as a context manager, so that the bar is closed in front of whatever is printed next."""

    def __init__(self, num_steps: int, stream: TextIO | None = None) -> None:
        stream = stream or sys.stderr
        self.num_steps = num_steps
        self._bar: tqdm[None] | None = None
        if stream.isatty():
            self._bar = tqdm(total=num_steps, file=stream, unit="step", dynamic_ncols=True)

    def update(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Show step `step`, counted from 1."""
        if self._bar is None:
            log.info(step_line(step, self.num_steps, metrics))
            return
        self._bar.set_postfix_str("  ".join(_parts(metrics)), refresh=False)
        self._bar.update(step - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _parts(metrics: Mapping[str, SupportsFloat]) -> list[str]:
    return [f"{label} {float(metrics[key]):{form}}" for key, label, form in _SHOWN if key in metrics]
