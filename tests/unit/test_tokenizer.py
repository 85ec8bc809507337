"""Which tokenizer is loaded, does it put BOS in front, what is refused? What all share is in test_tokenizers_agree.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megappo.data.tokenizer import HfTokenizer, SentencePieceTokenizer, encode_prompt, load_tokenizer
from megappo.errors import UserError


def make_sentencepiece(folder: Path, *, bos: bool = True, **config: object) -> Path:
    """One piece a character: <pad> 0, <s> 1 (where `bos`), </s> and <unk>, then a, b and c."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abc", "cab"]),
        model_prefix=str(folder / "tokenizer"),
        model_type="char",
        vocab_size=20,
        hard_vocab_limit=False,
        pad_id=0,
        bos_id=1 if bos else -1,
        eos_id=2,
        unk_id=3,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_hf(folder: Path) -> Path:
    """One token a letter: <s> 0, </s> 1, a 3, b 4. It puts nothing in front of a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 3, "b": 4}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


def test_a_folder_with_both_files_uses_tokenizer_json(tmp_path: Path) -> None:
    make_sentencepiece(tmp_path)
    assert isinstance(load_tokenizer(tmp_path), SentencePieceTokenizer)
    assert isinstance(load_tokenizer(tmp_path / "tokenizer.model"), SentencePieceTokenizer)
    make_hf(tmp_path)
    assert isinstance(load_tokenizer(tmp_path), HfTokenizer)


def test_sentencepiece_prompt_has_no_bos_where_the_config_beside_it_says_so(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_sentencepiece(tmp_path, add_bos_token=False))
    assert encode_prompt(tokenizer, "ab") == tokenizer.encode("ab")
    assert tokenizer.encode("ab", add_bos=True)[0] == 1


def test_sentencepiece_without_a_bos_piece_gets_none(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_sentencepiece(tmp_path, bos=False))
    assert tokenizer.bos_id is None and not tokenizer.adds_bos
    assert tokenizer.decode(encode_prompt(tokenizer, "cab"), skip_special=False) == "cab"


def test_hf_tokenizer_that_adds_no_bos_gives_none(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_hf(tmp_path))
    assert encode_prompt(tokenizer, "ab") == [3, 4]
    assert tokenizer.encode("ab", add_bos=True) == [0, 3, 4]


def test_ids_end_with_the_highest_where_the_vocabulary_has_a_gap(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_hf(tmp_path))
    assert tokenizer.vocab_size == 5
    assert tokenizer.decode([3, 2, 4]) == "a b"  # 2 is no token


def test_tokens_that_only_the_config_knows_are_refused(tmp_path: Path) -> None:
    added = {"1": {"content": "<s>", "special": True}, "7": {"content": "<|im_end|>", "special": True}}
    with pytest.raises(UserError, match=r"lacks tokens that tokenizer_config\.json adds to it \(<\|im_end\|>\)"):
        load_tokenizer(make_sentencepiece(tmp_path, added_tokens_decoder=added))


def test_a_tokenizer_without_an_end_of_sequence_is_refused(tmp_path: Path) -> None:
    (make_hf(tmp_path) / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(UserError, match=r"has no end-of-sequence token; add eos_token_id to its generation_config\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("folder", "neither tokenizer.json nor tokenizer.model"),
        ("file", "not a sentencepiece model"),
        ("json", "cannot be loaded"),
        ("model", "cannot be loaded"),
    ],
)
def test_missing_or_broken_tokenizer_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "tokenizer"
    if content == "file":
        path.write_bytes(b"not a model")
    elif content is not None:
        path.mkdir()
    if content == "json":
        (path / "tokenizer.json").write_text('{"version": ')
    elif content == "model":
        broken = json.loads((make_hf(path) / "tokenizer.json").read_text()) | {
            "model": {"type": "BPE", "vocab": {}, "merges": [5]}
        }
        (path / "tokenizer.json").write_text(json.dumps(broken))
    with pytest.raises(UserError, match=message):
        load_tokenizer(path)
