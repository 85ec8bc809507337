"""Do sentencepiece and Hugging Face tokenizers of one vocabulary give the same ids and the same text?

Three of them: a sentencepiece unigram model with byte fallback; the same pieces in a tokenizer.json, as Llama's were made; and a
byte-level tokenizer.json, as those of Llama 3 and Qwen are. In all of them <unk> is 0, <s> 1, </s> 2, <pad> 3, <|end|> 4, and the
byte b is 5 + b. `prefix` puts a space in front of a text, as the models of Llama 2 and Mistral do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megappo.data.tokenizer import Tokenizer, encode_prompt, load_tokenizer
from megappo.errors import UserError

UNK, BOS, EOS, PAD, END, BYTE = 0, 1, 2, 3, 4, 5
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
CORPUS = ["the cat sat on the mat", "[user] the hat", "[assistant] a cat", "[system] that"] * 5

Make = Callable[..., Tokenizer]


def special(pad: bool) -> list[str]:
    return ["<unk>", "<s>", "</s>", "<pad>" if pad else "<other>", "<|end|>"]


def make_sentencepiece(folder: Path, prefix: bool, pad: bool) -> None:
    import sentencepiece

    folder.mkdir(exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "tokenizer"),
        model_type="unigram",
        vocab_size=300,
        hard_vocab_limit=False,
        byte_fallback=True,
        unk_id=UNK,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=PAD if pad else -1,
        control_symbols=special(pad)[PAD + pad :],
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )


def make_same_pieces(folder: Path, prefix: bool, pad: bool) -> None:
    import sentencepiece
    from tokenizers import Tokenizer, decoders, models, normalizers

    make_sentencepiece(folder, prefix, pad)
    source = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    pieces = [(source.id_to_piece(i), source.get_score(i)) for i in range(source.vocab_size())]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=UNK, byte_fallback=True))
    spaces = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces] if prefix else [spaces])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    write_tokenizer_json(folder, tokenizer, pad)


def make_byte_level(folder: Path, prefix: bool, pad: bool) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    vocabulary = {name: i for i, name in enumerate(special(pad))} | {letters[b]: BYTE + b for b in range(256)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    write_tokenizer_json(folder, tokenizer, pad)


def write_tokenizer_json(folder: Path, tokenizer: Any, pad: bool) -> None:
    """With BOS in front of each text, and <unk> as the unknown token."""
    from tokenizers import processors

    tokenizer.add_special_tokens(special(pad))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names | ({"pad_token": "<pad>"} if pad else {})))


MAKERS = {"sentencepiece": make_sentencepiece, "same pieces": make_same_pieces, "byte level": make_byte_level}


def maker(kind: str, folder: Path, prefix: bool) -> Make:
    def make(pad: bool = True, template: str | None = None, generation_eos: object = None, **config: object) -> Tokenizer:
        MAKERS[kind](folder, prefix, pad)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        if generation_eos is not None:
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
        if config:
            path = folder / "tokenizer_config.json"
            path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | config))
        return load_tokenizer(folder)

    return make


@pytest.fixture(
    params=[(kind, prefix) for kind in MAKERS for prefix in (False, True) if not (prefix and kind == "byte level")], ids=str
)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return maker(*[request.param[0], tmp_path / "tokenizer", request.param[1]])


TEXTS = ["", " ", "the cat", " the  cat ", "cat€ü😀\n\tsat", "hat</s>", "<s>cat", "a<|end|> b<pad>", "日本", "\u2028x", "a\0b"]


@pytest.mark.parametrize("prefix", [False, True])
def test_the_same_pieces_give_the_same_ids(tmp_path: Path, prefix: bool) -> None:
    one, other = (maker(kind, tmp_path / kind, prefix)(template=TEMPLATE) for kind in ("sentencepiece", "same pieces"))
    assert type(one) is not type(other)
    assert (one.vocab_size, one.adds_bos) == (other.vocab_size, other.adds_bos)
    for text in TEXTS:
        assert one.encode(text) == other.encode(text), text
        assert encode_prompt(one, text) == encode_prompt(other, text), text
        assert encode_prompt(one, text, chat_template=True) == encode_prompt(other, text, chat_template=True), text
    for ids in [range(one.vocab_size), range(one.vocab_size - 1, 0, -1), *([BOS, i, i, EOS, i] for i in range(one.vocab_size))]:
        for skip_special in (True, False):
            assert one.decode(ids, skip_special) == other.decode(ids, skip_special)


class TestIds:
    def test_special_ids_are_those_of_the_vocabulary(self, make: Make) -> None:
        tokenizer = make()
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id, tokenizer.adds_bos) == (BOS, (EOS,), PAD, True)
        assert tokenizer.vocab_size > 260

    def test_text_comes_back(self, make: Make) -> None:
        tokenizer = make()
        for text in TEXTS:
            found = tokenizer.decode(tokenizer.encode(text), skip_special=False)
            if "<" in text:  # behind a special token a space may be added, as sentencepiece does in front of each text
                found, text = found.replace(" ", ""), text.replace(" ", "")
            assert found == text

    def test_empty_text_is_no_ids_and_with_bos_just_that(self, make: Make) -> None:
        tokenizer = make()
        assert tokenizer.encode("") == []
        assert encode_prompt(tokenizer, "") == tokenizer.encode("", add_bos=True) == [BOS]
        assert tokenizer.decode([]) == ""

    def test_bos_stands_in_front_once(self, make: Make) -> None:
        tokenizer = make()
        cat = tokenizer.encode("cat")
        assert BOS not in cat
        assert encode_prompt(tokenizer, "cat") == [BOS, *cat]
        assert encode_prompt(tokenizer, "<s>cat") == [BOS, *tokenizer.encode("<s>cat")[1:]]
        assert encode_prompt(tokenizer, "<s>cat").count(BOS) == 1

    def test_a_special_token_that_a_text_spells_is_its_id(self, make: Make) -> None:
        ids = make().encode("cat</s>hat<|end|>")
        assert [i for i in ids if i < BYTE] == [EOS, END] and ids[-1] == END

    def test_several_eos_ids_are_the_tokenizers_own_then_those_of_the_generation_config(self, make: Make) -> None:
        assert make(generation_eos=[END, EOS]).eos_ids == (EOS, END)
        assert make(generation_eos=END).eos_ids == (EOS, END)

    def test_pad_is_eos_where_there_is_no_pad_and_a_prompt_keeps_it(self, make: Make) -> None:
        """Trap C4: legal, because masks come from lengths."""
        tokenizer = make(pad=False)
        assert tokenizer.pad_id == EOS == tokenizer.eos_ids[0]
        assert encode_prompt(tokenizer, "cat</s>hat").count(EOS) == 1


class TestChat:
    def test_a_template_that_renders_bos_gives_one(self, make: Make) -> None:
        tokenizer = make(template=TEMPLATE)
        ids = encode_prompt(tokenizer, "the cat", chat_template=True)
        assert ids[0] == BOS and ids.count(BOS) == 1 and ids.count(EOS) == 1
        assert tokenizer.decode(ids).replace(" ", "") == "[user]thecat[assistant]"

    def test_a_template_without_bos_gets_none(self, make: Make) -> None:
        ids = encode_prompt(make(template="{{ messages[0]['content'] }}"), "cat", chat_template=True)
        assert BOS not in ids

    def test_the_system_prompt_stands_in_front_unless_the_messages_have_one(self, make: Make) -> None:
        tokenizer = make(template="{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}")

        def shown(prompt: Any) -> str:
            return tokenizer.decode(encode_prompt(tokenizer, prompt, chat_template=True, system_prompt="sat"))

        assert shown("cat") == "system:sat\nuser:cat\n"
        assert shown([{"role": "system", "content": "own"}, {"role": "user", "content": "hat"}]) == "system:own\nuser:hat\n"

    def test_no_template_and_a_template_that_refuses_are_user_errors(self, make: Make) -> None:
        with pytest.raises(UserError, match=r"no chat template; set data\.chat_template=false"):
            encode_prompt(make(), "cat", chat_template=True)
        for template, message in [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ messages[0]['name'] + 1 }}", "refuses the messages"),
            ("{{ messages[0]['content'] + 1 }}", "refuses the messages"),
            ("{% if %}", "refuses the messages"),
        ]:
            with pytest.raises(UserError, match=message):
                encode_prompt(make(template=template), "cat", chat_template=True)

    def test_messages_without_a_template_are_refused(self, make: Make) -> None:
        with pytest.raises(UserError, match=r"data\.chat_template=false"):
            encode_prompt(make(), [{"role": "user", "content": "cat"}])


class TestText:
    def test_special_tokens_are_shown_or_left_out(self, make: Make) -> None:
        tokenizer = make()
        a, b = BYTE + ord("x"), BYTE + ord("y")
        ids = [BOS, a, END, b, EOS, PAD]
        assert tokenizer.decode(ids) == "xy"
        assert tokenizer.decode(ids, skip_special=False) == "<s>x<|end|>y</s><pad>"

    def test_the_unknown_token_is_always_shown(self, make: Make) -> None:
        assert make().decode([BYTE + ord("x"), UNK, BYTE + ord("y")]) == "x<unk>y"

    def test_an_unknown_token_that_is_eos_too_is_left_out(self, tmp_path: Path) -> None:
        """As in the tokenizers of GPT-2 and SmolLM2."""
        for kind in ("same pieces", "byte level"):
            tokenizer = maker(kind, tmp_path / kind, prefix=False)(unk_token="</s>")
            assert tokenizer.decode([BYTE + ord("x"), EOS]) == "x"

    def test_ids_that_the_vocabulary_lacks_give_nothing(self, make: Make) -> None:
        tokenizer = make()
        x = BYTE + ord("x")
        assert tokenizer.decode([x, -1, tokenizer.vocab_size, 10**12, x]) == "xx"

    @pytest.mark.parametrize(
        ("raw", "text"),
        [
            (b"\xe2\x82\xac", "€"),
            (b"\xe2\x82", "\ufffd"),
            (b"\xf0\x9f\x98", "\ufffd"),
            (b"\xff\xfe", "\ufffd\ufffd"),
            (b"\xac\xe2\x82\xac", "\ufffd€"),
            (b"A\xe2\x82B\xe2\x82\xac", "A\ufffdB€"),
            (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
        ],
    )
    def test_bytes_that_are_not_utf8_become_replacement_characters(self, make: Make, raw: bytes, text: str) -> None:
        tokenizer = make()
        ids = [BYTE + value for value in raw]
        assert tokenizer.decode(ids) == text == raw.decode("utf-8", errors="replace")
        cat = tokenizer.encode("cat")
        assert tokenizer.decode([*ids, EOS, *cat, *ids]).replace(" ", "") == f"{text}cat{text}"

    def test_a_character_cut_by_a_special_token_is_whole_only_without_it(self, make: Make) -> None:
        ids = [BYTE + 0xE2, BYTE + 0x82, EOS, BYTE + 0xAC]
        assert make().decode(ids) == "€"
        assert make().decode(ids, skip_special=False) == "\ufffd</s>\ufffd"

    def test_ids_of_a_response_need_not_survive_decode_and_encode(self, make: Make) -> None:
        """Trap E8, the fact behind it: text is for people and rewards, so nothing may turn it back into ids."""
        tokenizer = make()
        response = [BYTE + ord("c"), BOS, BYTE + 0xE2, EOS]
        assert tokenizer.encode(tokenizer.decode(response)) != response
