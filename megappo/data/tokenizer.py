"""How does text become token ids and back? `load_tokenizer`: sentencepiece files and Hugging Face folders, one interface.

Ids are what the trainer works with; text is for prompts at the start, and for rewards and logs at the end. A response is never
decoded and encoded again. `encode_prompt` is the only way from a prompt to its ids, so that BOS stands in front exactly once.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megappo.data.chat import Message, chat_template, read_json, render_chat_text
from megappo.errors import UserError


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
        """Ids of the text, with nothing in front or behind but BOS where asked for (never a second one).

        Where the text spells a special token, such as "</s>", its id stands there."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of the ids, never an error. Bytes that are no UTF-8 give U+FFFD; ids that the vocabulary lacks give nothing.

        skip_special leaves out special tokens, but for the unknown one, which would hide that something was there."""
        ...

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
        self._config = read_json(path.parent / "tokenizer_config.json")
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id: int | None = _id_or_none(self._processor.bos_id())
        self.eos_ids = _eos_ids(path, _id_or_none(self._processor.eos_id()))
        pad_id = _id_or_none(self._processor.pad_id())
        self.pad_id: int = self.eos_ids[0] if pad_id is None else pad_id
        self.adds_bos = self.bos_id is not None and bool(self._config.get("add_bos_token", True))
        pieces = [self._processor.id_to_piece(i) for i in range(self.vocab_size)]
        self._bytes = [
            bytes.fromhex(piece[3:5]) if self._processor.is_byte(i) else piece.replace("\u2581", " ").encode()
            for i, piece in enumerate(pieces)
        ]
        added = self._config.get("added_tokens_decoder", {})
        beyond = [token["content"] for i, token in added.items() if int(i) >= self.vocab_size]
        if beyond:
            raise UserError(
                f"tokenizer {str(path)!r} lacks tokens that tokenizer_config.json adds to it ({', '.join(beyond)}); "
                "write a tokenizer.json with transformers and put it beside it"
            )
        self._special = {pieces[i]: i for i in range(self.vocab_size) if self._processor.is_control(i)}
        self._special_ids = set(self._special.values())
        self._spelled = re.compile("(" + "|".join(map(re.escape, self._special)) + ")") if self._special else None
        self._begins_with_space = self._processor.encode_as_pieces("a")[0].startswith("\u2581")

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        # sentencepiece does not look for control pieces in text, so they are cut out first.
        ids: list[int] = []
        for part in filter(None, self._spelled.split(text) if self._spelled else [text]):
            ids += [self._special[part]] if part in self._special else self._processor.encode(part)
        return _with_bos(ids, self.bos_id if add_bos else None)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        kept = [i for i in map(int, ids) if 0 <= i < self.vocab_size and not (skip_special and i in self._special_ids)]
        text = b"".join(self._bytes[i] for i in kept).decode("utf-8", errors="replace")
        # The space that `encode` puts in front of a text is not part of it.
        return text.removeprefix(" ") if self._begins_with_space and kept and kept[0] not in self._special_ids else text

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        names = {"bos_token": self.bos_id, "eos_token": self.eos_ids[0], "pad_token": self.pad_id}
        special = {name: self._processor.id_to_piece(i) for name, i in names.items() if i is not None}
        template = chat_template(self._path.parent, self._config)
        return _single_bos(self.encode(render_chat_text(template, messages, special, self._path)), self.bos_id)


class HfTokenizer:
    """A Hugging Face folder with tokenizer.json, through transformers (from the disk only)."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # the tokenizers library raises just that
            raise UserError(f"tokenizer {str(folder)!r} cannot be loaded ({_first_line(error)}); copy it again") from error
        self._backend: Any = self._tokenizer.backend_tokenizer  # twice as fast as transformers' own `encode`
        self._backend.no_truncation()  # what tokenizer.json may ask for
        self._backend.no_padding()
        self._folder = folder
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.bos_id: int | None = self._tokenizer.bos_token_id
        self.eos_ids = _eos_ids(folder, self._tokenizer.eos_token_id)
        pad_id = self._tokenizer.pad_token_id
        self.pad_id: int = self.eos_ids[0] if pad_id is None else pad_id
        self.adds_bos = self.bos_id is not None and self._tokenizer("a")["input_ids"][:1] == [self.bos_id]
        self._special_ids = {i for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        if self._tokenizer.unk_token_id not in (self.bos_id, self.pad_id, *self.eos_ids):  # GPT-2's is its EOS too
            self._special_ids.discard(self._tokenizer.unk_token_id)
        self._special_tokens = self._tokenizer.special_tokens_map
        byte_ids = [vocabulary.get(f"<0x{value:02X}>") for value in range(256)]
        self._byte_ids = [i for i in byte_ids if i is not None] if None not in byte_ids else []

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return _with_bos(ids, self.bos_id if add_bos else None)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        kept = [i for i in map(int, ids) if 0 <= i < self.vocab_size and not (skip_special and i in self._special_ids)]
        if self._byte_ids:
            kept = _valid_utf8(kept, self._byte_ids)
        text: str = self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        template = self._tokenizer.chat_template
        if not isinstance(template, str):
            template = chat_template(self._folder, {"chat_template": template})
        return _single_bos(self.encode(render_chat_text(template, messages, self._special_tokens, self._folder)), self.bos_id)


def _valid_utf8(ids: Sequence[int], byte_ids: Sequence[int]) -> list[int]:
    """The ids with U+FFFD in the place of byte tokens that are no UTF-8, one for each broken character as in Python.

    The tokenizers library replaces every byte of a run that has one broken character in it, also those of whole ones.
    byte_ids: id of the token of each byte."""
    value_of = {i: value for value, i in enumerate(byte_ids)}
    mended: list[int] = []
    for is_run, part in itertools.groupby(ids, value_of.__contains__):
        run = list(part)
        if is_run:
            text = bytes(value_of[i] for i in run).decode("utf-8", errors="replace")
            run = [byte_ids[value] for value in text.encode()]
        mended += run
    return mended


def _eos_ids(path: Path, own: int | None) -> tuple[int, ...]:
    """The tokenizer's own EOS, then those of generation_config.json in the same folder."""
    folder = path if path.is_dir() else path.parent
    more = read_json(folder / "generation_config.json").get("eos_token_id")
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


def _id_or_none(token_id: int) -> int | None:
    """sentencepiece says -1 for a special token that the model does not have."""
    return None if token_id < 0 else int(token_id)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
