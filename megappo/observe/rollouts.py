"""What did the model say in step n? `write_rollouts`: rollouts/step_000001.jsonl, one row a sample. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megappo.observe.metrics import as_json_number


@dataclass(frozen=True)
class RolloutRow:
    """One sample: token ids as the engine took and gave them, and their text for people to read."""

    sample_id: int
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    """The engine's log-prob of each response token."""
    weight_version: int
    finish_reason: str
    reward: float
    prompt: str
    response: str


def write_rollouts(folder: str | Path, step: int, rows: Iterable[RolloutRow]) -> Path:
    """Write the samples of one step and return the file. The file appears complete or not at all."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.jsonl"
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(_as_json(row), ensure_ascii=False, allow_nan=False) + "\n")
    os.replace(partial, path)
    return path


def _as_json(row: RolloutRow) -> dict[str, object]:
    return {
        "sample_id": row.sample_id,
        "prompt_ids": list(row.prompt_ids),
        "response_ids": list(row.response_ids),
        "logprobs": [as_json_number(x) for x in row.logprobs],
        "weight_version": row.weight_version,
        "finish_reason": row.finish_reason,
        "reward": as_json_number(row.reward),
        "prompt": row.prompt,
        "response": row.response,
    }
