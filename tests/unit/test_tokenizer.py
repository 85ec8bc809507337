"""Does text become the right ids, whatever the tokenizer, with BOS once and every end-of-sequence id known?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megappo.data.tokenizer import HfTokenizer, SentencePieceTokenizer, encode_prompt, load_tokenizer
from megappo.errors import UserError

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HF_VOCAB = {"<s>": 0, "</s>": 1, "<|end|>": 2, "a": 3, "b": 4, "[user]": 5, "[assistant]": 6, "[system]": 7}


def make_sentencepiece(folder: Path, *, bos: bool = True, **config: object) -> Path:
    """Pieces: <pad> 0, <s> 1 (where `bos`), </s>, <unk>, then a, b, c, [, ], and what else the words below need."""
    import sentencepiece

    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["abc", "[user]", "[assistant]", "[system]", "cab"]),
        model_prefix=str(folder / "tokenizer"),
        model_type="char",
        vocab_size=20,
        hard_vocab_limit=False,
        pad_id=0,
        bos_id=1 if bos else -1,
        eos_id=2,
        unk_id=3,
        add_dummy_prefix=False,
        character_coverage=1.0,
        minloglevel=2,
    )
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_hf(folder: Path, *, post_processor: bool, generation_eos: list[int] | None = None, **config: object) -> Path:
    """One token a word of HF_VOCAB; with `post_processor` the tokenizer puts <s> in front, as Llama's does. No pad token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel(HF_VOCAB, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<s>", "</s>", "<|end|>"])
    tokenizer.add_tokens(["[user]", "[assistant]", "[system]"])
    if post_processor:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | config))
    if generation_eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    return folder


def test_sentencepiece_prompt_has_bos_exactly_once(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_sentencepiece(tmp_path) / "tokenizer.model")
    ids = encode_prompt(tokenizer, "ab")
    assert ids[0] == 1 and ids.count(1) == 1
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.encode("ab") == ids[1:]


def test_sentencepiece_prompt_has_no_bos_where_the_config_beside_it_says_so(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_sentencepiece(tmp_path, add_bos_token=False))
    assert encode_prompt(tokenizer, "ab") == tokenizer.encode("ab")
    assert tokenizer.encode("ab", add_bos=True)[0] == 1


def test_sentencepiece_without_a_bos_piece_gets_none(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_sentencepiece(tmp_path, bos=False))
    assert tokenizer.bos_id is None and not tokenizer.adds_bos
    assert tokenizer.decode(encode_prompt(tokenizer, "cab"), skip_special=False) == "cab"


def test_sentencepiece_decode_shows_or_hides_special_tokens_and_passes_over_padding_rows(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_sentencepiece(tmp_path))
    a, b = tokenizer.encode("ab")
    ids = [1, a, b, 2, 0, 10_000]
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.decode(ids, skip_special=False) == "<s>ab</s><pad>"


def test_sentencepiece_chat_template_makes_control_pieces_ids_and_bos_once(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_sentencepiece(tmp_path, chat_template=TEMPLATE))
    ids = encode_prompt(tokenizer, "ab", chat_template=True)
    assert tokenizer.decode(ids, skip_special=False) == "<s>[user]ab</s>[assistant]"
    assert ids.count(1) == 1 and ids.count(2) == 1


def test_folder_with_both_files_uses_tokenizer_json(tmp_path: Path) -> None:
    make_sentencepiece(tmp_path)
    assert isinstance(load_tokenizer(tmp_path), SentencePieceTokenizer)
    make_hf(tmp_path, post_processor=False)
    assert isinstance(load_tokenizer(tmp_path), HfTokenizer)


def test_hf_tokenizer_that_adds_bos_itself_gives_one(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_hf(tmp_path, post_processor=True))
    assert tokenizer.adds_bos
    assert encode_prompt(tokenizer, "ab") == [0, 3, 4]
    assert encode_prompt(tokenizer, "<s>ab") == [0, 3, 4]
    assert tokenizer.encode("ab") == [3, 4]


def test_hf_tokenizer_that_adds_no_bos_gives_none(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_hf(tmp_path, post_processor=False))
    assert encode_prompt(tokenizer, "ab") == [3, 4]


def test_template_with_bos_and_tokenizer_with_bos_give_one(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_hf(tmp_path, post_processor=True, chat_template=TEMPLATE))
    assert encode_prompt(tokenizer, "ab", chat_template=True) == [0, 5, 3, 4, 1, 6]


def test_system_prompt_stands_in_front_unless_the_messages_have_one(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_hf(tmp_path, post_processor=False, chat_template=TEMPLATE))
    assert encode_prompt(tokenizer, "a", chat_template=True, system_prompt="b") == [0, 7, 4, 1, 5, 3, 1, 6]
    own = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert encode_prompt(tokenizer, own, chat_template=True, system_prompt="b") == [0, 7, 3, 1, 5, 4, 1, 6]


def test_eos_ids_are_the_tokenizers_own_then_those_of_the_generation_config(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_hf(tmp_path, post_processor=False, generation_eos=[2, 1]))
    assert tokenizer.eos_ids == (1, 2)


def test_pad_is_eos_where_the_tokenizer_has_no_pad(tmp_path: Path) -> None:
    """Trap C4: legal, because masks come from lengths; the prompt that holds the pad id keeps it."""
    tokenizer = load_tokenizer(make_hf(tmp_path, post_processor=False))
    assert tokenizer.pad_id == 1 == tokenizer.eos_ids[0]
    assert tokenizer.encode("a</s>b") == [3, 1, 4]


def test_missing_template_is_refused_in_one_line(tmp_path: Path) -> None:
    for tokenizer in (
        load_tokenizer(make_hf(tmp_path / "hf", post_processor=False)),
        load_tokenizer(make_sentencepiece(tmp_path / "sp")),
    ):
        with pytest.raises(UserError, match=r"no chat template; set data\.chat_template=false"):
            encode_prompt(tokenizer, "a", chat_template=True)


def test_template_that_refuses_the_messages_is_a_user_error(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = load_tokenizer(make_hf(tmp_path, post_processor=False, chat_template=template))
    with pytest.raises(UserError, match="roles must alternate"):
        encode_prompt(tokenizer, "a", chat_template=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), ("folder", "neither tokenizer.json nor tokenizer.model"), ("file", "not a sentencepiece model")],
)
def test_missing_or_broken_tokenizer_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "tokenizer"
    if content == "folder":
        path.mkdir()
    elif content == "file":
        path.write_bytes(b"not a model")
    with pytest.raises(UserError, match=message):
        load_tokenizer(path)


def test_ids_of_a_response_need_not_survive_decode_and_encode(tmp_path: Path) -> None:
    """Trap E8, the fact behind it: text is for people and rewards, so nothing may turn it back into ids."""
    tokenizer = load_tokenizer(make_sentencepiece(tmp_path))
    a, b = tokenizer.encode("ab")
    response = [a, 1, b, 2]
    assert tokenizer.encode(tokenizer.decode(response)) != response
