"""Where do prompts come from without a file? `reasoning_gym:TASK`: generated problems, each with its own scorer."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megappo.config.schema_learning import DataConfig
from megappo.errors import UserError

TASK_PREFIX = "reasoning_gym:"
ENTRY_KEY = "reasoning_gym"
"""Key of a row under which the task's own entry lies, for its scorer."""


def task_rows(source: str, data: DataConfig, seed: int) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """(where, position from 1, row) of `data.task_size` problems; the seed decides which."""
    gym = _reasoning_gym(source)
    task = source.removeprefix(TASK_PREFIX)
    known = gym.factory.DATASETS
    if task not in known:
        near = difflib.get_close_matches(task, known, n=1)
        hint = f"did you mean {TASK_PREFIX}{near[0]}?" if near else f"e.g. {TASK_PREFIX}chain_sum"
        raise UserError(f"{source}: reasoning_gym has no task {task!r}; {hint}")
    try:
        dataset = gym.create_dataset(task, size=data.task_size, seed=seed, **data.task_options)
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"{source}: data.task_options={data.task_options} is refused by the task ({error}); mend them") from None
    for i in range(data.task_size):
        entry = dataset[i]
        row = {data.prompt_key: entry["question"], data.answer_key: entry["answer"], ENTRY_KEY: entry}
        yield f"{source} row {i + 1}", i + 1, row


def task_scorer(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    """The scorer of a task: (answer text, entry) to a score from 0 to 1."""
    score = _reasoning_gym(f"{TASK_PREFIX}{task}").get_score_answer_fn(task)
    return lambda answer, entry: float(score(answer=answer, entry=entry))


def _reasoning_gym(source: str) -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.factory
    except ImportError:
        raise UserError(
            f"{source} needs the package reasoning-gym, which is not installed; pip install 'megappo[tasks]'"
        ) from None
    return reasoning_gym
