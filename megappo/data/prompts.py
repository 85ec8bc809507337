"""Which prompts does a step get? JSONL rows with their token ids, in an order that is a function of (seed, epoch) alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megappo.config.schema import DataConfig
from megappo.data.tasks import TASK_PREFIX, task_rows
from megappo.data.tokenizer import Tokenizer, encode_prompt
from megappo.errors import UserError


@dataclass(frozen=True)
class PromptRow:
    """One prompt. row_id: its place in the file, from 0. fields: the whole row, as reward functions get it."""

    row_id: int
    prompt_ids: tuple[int, ...]
    prompt: str | tuple[Mapping[str, str], ...]
    answer: str | None
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def prompt_text(self) -> str:
        """The prompt as a person reads it: the text, or the content of the last chat message."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]


def load_prompts(source: str, data: DataConfig, tokenizer: Tokenizer, max_prompt_tokens: int, seed: int = 0) -> list[PromptRow]:
    """The rows of a JSONL file, or of a generated task (`reasoning_gym:TASK`, of which `seed` decides the rows).

    Raises UserError that names file and line for a row that cannot be used. Nothing is dropped or cut silently."""
    if source.startswith(TASK_PREFIX):
        found: Iterator[tuple[str, Mapping[str, Any]]] = task_rows(source, data, seed)
    else:
        found = _jsonl_rows(source)
    rows = [_to_row(i, where, fields, data, tokenizer, max_prompt_tokens) for i, (where, fields) in enumerate(found)]
    if not rows:
        raise UserError(f"{source}: holds no prompts; give a JSONL file with one object with {data.prompt_key!r} a line")
    return rows


def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """Order of the rows in an epoch. From raw bits, whose stream numpy promises to keep (of `permutation` it does not)."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    return [int(i) for i in np.argsort(bits, kind="stable")]


class PromptStream:
    """Batches of rows without end. Its whole state is (epoch, offset), so a resumed run goes on with the very next row."""

    def __init__(self, rows: Sequence[PromptRow], seed: int, shuffle: bool = True) -> None:
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._set(0, 0)

    def next_batch(self, num_rows: int) -> list[PromptRow]:
        """The next rows; where an epoch ends inside the batch the next epoch goes on in it. No row is skipped or left over."""
        batch: list[PromptRow] = []
        while len(batch) < num_rows:
            if self._offset == len(self._rows):
                self._set(self._epoch + 1, 0)
            taken = self._order[self._offset : self._offset + num_rows - len(batch)]
            self._offset += len(taken)
            batch += [self._rows[i] for i in taken]
        return batch

    def state(self) -> dict[str, int]:
        return {"epoch": self._epoch, "offset": self._offset, "num_rows": len(self._rows)}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on where `state()` was taken. Raises UserError where the data has another number of rows now."""
        if state["num_rows"] != len(self._rows):
            raise UserError(
                f"data.train has {len(self._rows)} rows and the saved run had {state['num_rows']}; resume with the same data"
            )
        self._set(state["epoch"], state["offset"])

    def _set(self, epoch: int, offset: int) -> None:
        self._epoch, self._offset = epoch, offset
        num_rows = len(self._rows)
        self._order = epoch_order(num_rows, self._seed, epoch) if self._shuffle else list(range(num_rows))


def _jsonl_rows(source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(file:line, object) of each line that is not blank."""
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"data file {source!r} does not exist; give the path of a JSONL file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data file {source!r} cannot be read ({error}); give the path of a JSONL file in UTF-8") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{source}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: not valid JSON ({error}); each line must be one JSON object") from None
        if not isinstance(row, dict):
            raise UserError(f"{where}: holds a {type(row).__name__}, not an object; each line must be one JSON object")
        yield where, row


def _to_row(
    row_id: int, where: str, fields: Mapping[str, Any], data: DataConfig, tokenizer: Tokenizer, max_prompt_tokens: int
) -> PromptRow:
    if data.prompt_key not in fields:
        present = ", ".join(fields) or "none"
        raise UserError(f"{where}: no key {data.prompt_key!r} (keys present: {present}); add it or set data.prompt_key")
    prompt = _prompt(fields[data.prompt_key], where, data)
    ids = encode_prompt(tokenizer, prompt, data.chat_template, data.system_prompt)
    if not ids:
        raise UserError(f"{where}: the prompt is empty after tokenization; give it text or remove the row")
    if len(ids) > max_prompt_tokens:
        raise UserError(
            f"{where}: the prompt has {len(ids)} tokens, more than rollout.max_prompt_tokens={max_prompt_tokens}; "
            "raise that or remove the row"
        )
    return PromptRow(row_id, tuple(ids), prompt, _answer(fields.get(data.answer_key), where, data), fields)


def _prompt(value: Any, where: str, data: DataConfig) -> str | tuple[Mapping[str, str], ...]:
    if isinstance(value, str):
        if not value.strip():
            raise UserError(f"{where}: {data.prompt_key!r} is empty; give it text or remove the row")
        return value
    if not isinstance(value, list) or not value or not all(_is_message(message) for message in value):
        raise UserError(
            f"{where}: {data.prompt_key!r} is neither a string nor a list of chat messages "
            '({"role": "user", "content": "..."}); mend the row'
        )
    if not data.chat_template:
        raise UserError(f"{where}: {data.prompt_key!r} holds chat messages and data.chat_template=false; set it to true")
    return tuple(value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _answer(value: Any, where: str, data: DataConfig) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise UserError(
        f"{where}: {data.answer_key!r} is a {type(value).__name__}; give a string or a number, or set data.answer_key"
    )
