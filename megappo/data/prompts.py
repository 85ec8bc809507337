"""Which prompts are there? `load_prompts`: the rows of all sources with their token ids; a row that cannot be used is named."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megappo.config.schema_learning import DataConfig
from megappo.data.sources import source_list, source_rows
from megappo.data.tokenizer import Tokenizer, encode_prompt
from megappo.errors import UserError

log = logging.getLogger("megappo")

_DONE = {"drop": "dropped", "truncate_left": "cut on the left", "truncate_right": "cut on the right"}


@dataclass(frozen=True)
class PromptRow:
    """One prompt.

    row_id: its number over all sources, from 0; rows that were dropped count. fields: the whole row, as reward functions get it.
    source: as the config names it. position: line or row in the source, from 1. id: the row's own, else "source:position".
    """

    row_id: int
    prompt_ids: tuple[int, ...]
    prompt: str | tuple[Mapping[str, Any], ...]
    answer: str | None
    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)
    source: str = ""
    position: int = 0
    id: str = ""

    @property
    def prompt_text(self) -> str:
        """The prompt as a person reads it: the text, or the content of the last chat message."""
        return self.prompt if isinstance(self.prompt, str) else str(self.prompt[-1]["content"])


def load_prompts(
    sources: str | tuple[str, ...],
    data: DataConfig,
    tokenizer: Tokenizer,
    max_prompt_tokens: int,
    seed: int = 0,
    key: str = "data.train",
) -> list[PromptRow]:
    """The rows of all sources, one source after the other. `seed` decides the rows of generated tasks.

    A prompt of more than `max_prompt_tokens` tokens (chat template and BOS included) is treated as `data.overlong` says, and a
    line of the log, which begins with `key`, counts them. Raises UserError that names file and line for a row that cannot be
    used, and for a source that gives no prompt."""
    rows: list[PromptRow] = []
    num_found = 0
    for source in source_list(sources):
        num_before, num_kept, num_overlong = num_found, len(rows), 0
        for where, position, fields in source_rows(source, data, seed):
            row = _to_row(num_found, where, source, position, fields, data, tokenizer)
            num_found += 1
            if len(row.prompt_ids) <= max_prompt_tokens:
                rows.append(row)
                continue
            num_overlong += 1
            if data.overlong == "fail":
                raise UserError(
                    f"{where}: the prompt has {len(row.prompt_ids)} tokens, more than rollout.max_prompt_tokens="
                    f"{max_prompt_tokens}; raise that, remove the row, or set data.overlong to drop or truncate such prompts"
                )
            if data.overlong != "drop":
                rows.append(replace(row, prompt_ids=_cut(row.prompt_ids, max_prompt_tokens, data.overlong, tokenizer.bos_id)))
        found = num_found - num_before
        if not found:
            raise UserError(f"{source}: holds no prompts; give a source of rows with {data.prompt_key!r}")
        if num_kept == len(rows):
            raise UserError(
                f"{source}: all {found} prompts are longer than rollout.max_prompt_tokens={max_prompt_tokens}, and "
                f"data.overlong=drop leaves none; raise the limit or use data.overlong=truncate_left"
            )
        if num_overlong:
            log.info(
                "%s: %d of %d prompts of %s are longer than rollout.max_prompt_tokens=%d: %s",
                *(key, num_overlong, found, source, max_prompt_tokens, _DONE[data.overlong]),
            )
    return rows


def _cut(
    ids: tuple[int, ...], length: int, side: Literal["truncate_left", "truncate_right"], bos_id: int | None
) -> tuple[int, ...]:
    """`length` of the ids. truncate_right keeps the first ones, truncate_left the last ones.

    A BOS in front is kept by truncate_left too, as the first of the `length`. Nothing else is looked at: of a chat template
    truncate_left cuts off the first messages with their marks, truncate_right the mark at which the assistant begins."""
    if side == "truncate_right":
        return ids[:length]
    head = ids[:1] if ids[0] == bos_id else ()
    return head + ids[len(ids) - length + len(head) :]


def _to_row(
    row_id: int, where: str, source: str, position: int, fields: Mapping[str, Any], data: DataConfig, tokenizer: Tokenizer
) -> PromptRow:
    if data.prompt_key not in fields:
        present = ", ".join(fields) or "none"
        raise UserError(f"{where}: no key {data.prompt_key!r} (keys present: {present}); add it or set data.prompt_key")
    prompt = _prompt(fields[data.prompt_key], where, data)
    try:
        ids = encode_prompt(tokenizer, prompt, data.chat_template, data.system_prompt)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not ids:
        raise UserError(f"{where}: the prompt is empty after tokenization; give it text or remove the row")
    answer = _text(fields, data.answer_key, "data.answer_key", where)
    own_id = _text(fields, data.id_key, "data.id_key", where)
    return PromptRow(
        row_id, tuple(ids), prompt, answer, fields, source, position, f"{source}:{position}" if own_id is None else own_id
    )


def _prompt(value: Any, where: str, data: DataConfig) -> str | tuple[Mapping[str, Any], ...]:
    """The prompt as text or messages. Keys of a message that are null are left out: parquet gives every message every key."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise UserError(f"{where}: {data.prompt_key!r} is empty; give it text or remove the row")
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise UserError(
            f"{where}: {data.prompt_key!r} is neither a string nor a list of chat messages "
            '({"role": "user", "content": "..."}); mend the row'
        )
    if not data.chat_template:
        raise UserError(f"{where}: {data.prompt_key!r} holds chat messages and data.chat_template=false; set it to true")
    return tuple({key: part for key, part in message.items() if part is not None} for message in value)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _text(fields: Mapping[str, Any], key: str, setting: str, where: str) -> str | None:
    """A string or number of the row as text; None where the row has none."""
    value = fields.get(key)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise UserError(f"{where}: {key!r} is a {type(value).__name__}; give a string or a number, or set {setting}")
