"""How does text become token ids and back? `load_tokenizer`: sentencepiece files and Hugging Face folders, one interface.

Ids are what the trainer works with; text is for prompts at the start, and for rewards and logs at the end. A response is never
decoded and encoded again. `encode_prompt` is the only way from a prompt to its ids, so that BOS stands in front exactly once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megappo.errors import UserError

Message = Mapping[str, str]


class Tokenizer(Protocol):
    """Text to ids and back.

    adds_bos: the model was trained with BOS in front of each text. eos_ids: every id that ends a response, the tokenizer's own
    first. pad_id: any id that the embedding has; it may be an EOS id, so masks come from lengths, never from equality with it.
    """

    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int
    vocab_size: int
    adds_bos: bool

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        """Ids of the text, with nothing in front or behind but BOS where asked for (never a second one)."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the messages up to where the assistant begins to speak, as the model's own template says."""
        ...


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer at `path`: a sentencepiece `.model` file, or a Hugging Face folder (tokenizer.json, else tokenizer.model)."""
    path = Path(path)
    if path.is_file():
        return SentencePieceTokenizer(path)
    if not path.exists():
        raise UserError(f"tokenizer {str(path)!r} does not exist; give a Hugging Face folder or a sentencepiece .model file")
    if (path / "tokenizer.json").is_file():
        return HfTokenizer(path)
    if (path / "tokenizer.model").is_file():
        return SentencePieceTokenizer(path / "tokenizer.model")
    raise UserError(
        f"tokenizer {str(path)!r} has neither tokenizer.json nor tokenizer.model; set model.tokenizer to where they are"
    )


def encode_prompt(
    tokenizer: Tokenizer, prompt: str | Sequence[Message], chat_template: bool = False, system_prompt: str | None = None
) -> list[int]:
    """Ids of a prompt, for training, validation and warm start alike.

    Plain text gets BOS where the model was trained with it; with a chat template the template alone decides."""
    if not chat_template:
        if not isinstance(prompt, str):
            raise UserError("the prompt is a list of chat messages and data.chat_template=false; set data.chat_template=true")
        return tokenizer.encode(prompt, add_bos=tokenizer.adds_bos)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if system_prompt is not None and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return tokenizer.render_chat(messages)


class SentencePieceTokenizer:
    """A sentencepiece model; tokenizer_config.json and chat_template.jinja beside it are read where they are there."""

    def __init__(self, path: Path) -> None:
        import sentencepiece

        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise UserError(f"tokenizer {str(path)!r} is not a sentencepiece model ({error}); copy the file again") from None
        self._path = path
        self._config = _read_json(path.parent / "tokenizer_config.json")
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id: int | None = _id_or_none(self._processor.bos_id())
        self.eos_ids = _eos_ids(path, _id_or_none(self._processor.eos_id()))
        pad_id = _id_or_none(self._processor.pad_id())
        self.pad_id: int = self.eos_ids[0] if pad_id is None else pad_id
        self.adds_bos = self.bos_id is not None and bool(self._config.get("add_bos_token", True))
        special = [i for i in range(self.vocab_size) if self._processor.is_control(i)]
        self._special = {self._processor.id_to_piece(i): i for i in special}

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        return _with_bos(self._processor.encode(text), self.bos_id if add_bos else None)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        pieces, run = [], []
        special = {i: piece for piece, i in self._special.items()}
        for i in map(int, ids):
            if i not in special:
                run += [i] if i < self.vocab_size else []
            elif not skip_special:
                pieces += [self._processor.decode(run), special[i]]
                run = []
        return "".join([*pieces, self._processor.decode(run)])

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        names = {"bos_token": self.bos_id, "eos_token": self.eos_ids[0], "pad_token": self.pad_id}
        special = {name: self._processor.id_to_piece(i) for name, i in names.items() if i is not None}
        text = _render(_chat_template(self._path.parent, self._config), messages, special, self._path)
        # sentencepiece does not look for control pieces in text, so they are cut out first.
        parts = re.split("(" + "|".join(map(re.escape, self._special)) + ")", text) if self._special else [text]
        ids: list[int] = []
        for part in filter(None, parts):
            ids += [self._special[part]] if part in self._special else self._processor.encode(part)
        return _single_bos(ids, self.bos_id)


class HfTokenizer:
    """A Hugging Face folder with tokenizer.json, through transformers (from the disk only)."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"tokenizer {str(folder)!r} cannot be loaded ({_first_line(error)}); copy the folder again") from None
        self._folder = folder
        self.vocab_size = len(self._tokenizer)
        self.bos_id: int | None = self._tokenizer.bos_token_id
        self.eos_ids = _eos_ids(folder, self._tokenizer.eos_token_id)
        pad_id = self._tokenizer.pad_token_id
        self.pad_id: int = self.eos_ids[0] if pad_id is None else pad_id
        self.adds_bos = self.bos_id is not None and self._tokenizer("a")["input_ids"][:1] == [self.bos_id]

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return _with_bos(ids, self.bos_id if add_bos else None)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        kept = [int(i) for i in ids if i < self.vocab_size]
        text: str = self._tokenizer.decode(kept, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return text

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            template = _chat_template(self._folder, {"chat_template": template})
        text = _render(template, messages, self._tokenizer.special_tokens_map, self._folder)
        return _single_bos(self.encode(text), self.bos_id)


def _eos_ids(path: Path, own: int | None) -> tuple[int, ...]:
    """The tokenizer's own EOS, then those of generation_config.json in the same folder."""
    folder = path if path.is_dir() else path.parent
    more = _read_json(folder / "generation_config.json").get("eos_token_id")
    listed = more if isinstance(more, list) else [more]
    ids = tuple(dict.fromkeys(i for i in (own, *listed) if isinstance(i, int)))
    if not ids:
        raise UserError(f"tokenizer {str(path)!r} has no end-of-sequence token; add eos_token_id to its generation_config.json")
    return ids


def _with_bos(ids: list[int], bos_id: int | None) -> list[int]:
    return _single_bos([bos_id, *ids] if bos_id is not None else ids, bos_id)


def _single_bos(ids: list[int], bos_id: int | None) -> list[int]:
    """Without the second and later BOS at the front (the template and the text may each have brought one)."""
    while bos_id is not None and ids[:2] == [bos_id, bos_id]:
        ids = ids[1:]
    return ids


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str:
    """The template beside the tokenizer: chat_template.jinja, else the key in tokenizer_config.json (the one named `default`)."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise UserError(
            f"tokenizer {str(folder)!r} has no chat template; set data.chat_template=false or add chat_template.jinja"
        )
    return template


def _render(template: str, messages: Sequence[Message], special_tokens: Mapping[str, Any], source: Path) -> str:
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template([list(messages)], chat_template=template, add_generation_prompt=True, **special_tokens)
    except TemplateError as error:
        raise UserError(f"the chat template of {str(source)!r} refuses the messages ({error}); mend the messages") from None
    return str(texts[0])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); copy the file again from the model's source") from None
    return loaded if isinstance(loaded, dict) else {}


def _id_or_none(token_id: int) -> int | None:
    """sentencepiece says -1 for a special token that the model does not have."""
    return None if token_id < 0 else int(token_id)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
