"""Which rewards come with megappo? Functions of (prompt, response, answer, row) that return a number."""

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
    """1 where the last number in the response equals the answer as a number (`42`, `042`, `42.0` are one number)."""
    wanted = float(_required(answer).replace(",", ""))
    numbers = _NUMBER.findall(response)
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == wanted)


def reasoning_gym(prompt: str, response: str, answer: str | None, row: Mapping[str, Any]) -> float:
    """The score of the task's own scorer; for rows of `data.train=reasoning_gym:TASK`."""
    if ENTRY_KEY not in row:
        raise ValueError("reward.function=reasoning_gym scores only rows of data.train=reasoning_gym:TASK")
    entry = row[ENTRY_KEY]
    return task_scorer(entry["metadata"]["source_dataset"])(response.strip(), entry)


BUILTIN: dict[str, RewardFunction] = {"exact_match": exact_match, "last_number": last_number, "reasoning_gym": reasoning_gym}


def _required(answer: str | None) -> str:
    if answer is None:
        raise ValueError("the row has no answer")
    return answer
