"""What did the model say in step n? `write_rollouts`: rollouts/step_000001.jsonl, one row a sample. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megappo.observe.metrics import as_json_number


@dataclass(frozen=True)
class RolloutRow:
    """One sample: token ids as the engine took and gave them, and their text for people to read.

    row_id, id, source, position: the row of the data that it is a sample of; see PromptRow in data/prompts.py."""

    sample_id: int
    row_id: int
    id: str
    source: str
    position: int
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    """The engine's log-prob of each response token."""
    weight_version: int
    finish_reason: str
    reward: float
    """NaN (null in the file) where the sample was skipped."""
    reward_parts: Mapping[str, float]
    """Each of `reward.parts`, unweighted; NaN where the reward failed before it had a value."""
    skipped: bool
    """Whether the reward failed and the sample was left out of the step."""
    learnt: bool
    """Whether a step learns from it: not where dynamic sampling left its prompt out, nor in a validation."""
    temperature: float
    """That it was sampled at; 0: greedy."""
    prompt: str
    response: str
    answer: str | None


def write_rollouts(folder: str | Path, step: int, rows: Iterable[RolloutRow]) -> Path:
    """Write the samples of one step and return the file."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return write_rows(folder / f"step_{step:06d}.jsonl", rows)


def write_rows(path: Path, rows: Iterable[RolloutRow]) -> Path:
    """Write one line a row and return the file. It appears complete or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(_as_json(row), ensure_ascii=False, allow_nan=False) + "\n")
    os.replace(partial, path)
    return path


def _as_json(row: RolloutRow) -> dict[str, object]:
    return {
        "sample_id": row.sample_id,
        "row_id": row.row_id,
        "id": row.id,
        "source": row.source,
        "position": row.position,
        "prompt_ids": list(row.prompt_ids),
        "response_ids": list(row.response_ids),
        "logprobs": [as_json_number(x) for x in row.logprobs],
        "weight_version": row.weight_version,
        "finish_reason": row.finish_reason,
        "reward": as_json_number(row.reward),
        "reward_parts": {name: as_json_number(value) for name, value in row.reward_parts.items()},
        "skipped": row.skipped,
        "learnt": row.learnt,
        "temperature": row.temperature,
        "prompt": row.prompt,
        "response": row.response,
        "answer": row.answer,
    }
