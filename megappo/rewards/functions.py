"""Which rewards come with megappo? Functions of (prompt, response, answer, row) that return a number. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from megappo.data.tasks import ENTRY_KEY, task_scorer


class RewardFunction(Protocol):
    """Scores one response.

    prompt and response are text without special tokens; answer is the row's (`data.answer_key`) or None; row is the whole row of
    the data file. Returns a finite number. What raises, or returns anything else, falls under `reward.on_error`."""

    def __call__(self, prompt: str, response: str, answer: str | None, row: Mapping[str, Any]) -> float: ...


def exact_match(prompt: str, response: str, answer: str | None, row: Mapping[str, Any]) -> float:
    """1 where the response, without white space around it, is the answer."""
    return float(response.strip() == _required(answer).strip())


_NUMBER = re.compile(r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?")


def last_number(prompt: str, response: str, answer: str | None, row: Mapping[str, Any]) -> float:
    """1 where the last number in the response equals the answer as a number (`42`, `042`, `42.0` are one number).

    Of an answer with a `####`, as in GSM8K, only what follows it counts."""
    wanted = float(_required(answer).rpartition("####")[2].replace(",", ""))
    numbers = _NUMBER.findall(response)
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == wanted)


# Whole seconds that math-verify may take for one response; together well below the default of reward.timeout_s.
_PARSING_S, _COMPARING_S = 2, 3


def math(prompt: str, response: str, answer: str | None, row: Mapping[str, Any]) -> float:
    r"""1 where the response is mathematically equal to the answer, by math-verify.

    In the response the last `\boxed{}` counts; without one LaTeX between `$`, or else the last number or expression. The answer
    may be bare LaTeX (`\frac{1}{2}`), boxed, between `$`, or behind a `####`. A response that cannot be read, or takes seconds to
    compare (a tower of powers), scores 0: the policy wrote it. An answer that cannot be read is an error of the data."""
    import sympy
    from math_verify import parse, verify

    text = _required(answer).rpartition("####")[2].strip()
    wanted = parse(text if any(mark in text for mark in ("$", r"\boxed", r"\(", r"\[")) else rf"\boxed{{{text}}}")
    if not any(isinstance(found, sympy.Basic | sympy.MatrixBase) for found in wanted):
        raise ValueError(f"the answer {answer!r} is no mathematics that math-verify can read")
    boxed = response.rfind(r"\boxed")
    given = parse(response[max(boxed, 0) :], parsing_timeout=_PARSING_S)
    return float(verify(wanted, given, timeout_seconds=_COMPARING_S))


def reasoning_gym(prompt: str, response: str, answer: str | None, row: Mapping[str, Any]) -> float:
    """The score of the task's own scorer; for rows of `data.train=reasoning_gym:TASK`."""
    if ENTRY_KEY not in row:
        raise ValueError("reward.function=reasoning_gym scores only rows of data.train=reasoning_gym:TASK")
    entry = row[ENTRY_KEY]
    return task_scorer(entry["metadata"]["source_dataset"])(response.strip(), entry)


BUILTIN: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "last_number": last_number,
    "math": math,
    "reasoning_gym": reasoning_gym,
}
IN_DRIVER = frozenset({"exact_match", "last_number"})
"""What cannot hang or crash and runs in the driver; all else, the user's functions included, runs in worker processes."""
PACKAGES = {"math": "math_verify", "reasoning_gym": "reasoning_gym"}
"""Modules that a built-in reward needs, from the extra `tasks`."""


def _required(answer: str | None) -> str:
    if answer is None:
        raise ValueError("the row has no answer")
    return answer
