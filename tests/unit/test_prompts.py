"""Are rows read, named when they are bad, and served in an order that depends on nothing but seed and epoch?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megappo.config.schema import DataConfig
from megappo.data.prompts import PromptRow, PromptStream, epoch_order, load_prompts
from megappo.data.tokenizer import Message
from megappo.errors import UserError

DATA = DataConfig(train="unused")


class Letters:
    """One token a character; a chat message ends in 2."""

    bos_id, eos_ids, pad_id, vocab_size, adds_bos = 1, (2,), 0, 200, False

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(map(chr, ids))

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        return [i for message in messages for i in [*self.encode(message["content"]), 2]]


def load(path: Path, text: str, data: DataConfig = DATA, limit: int = 8) -> list[PromptRow]:
    path = path / "rows.jsonl"
    path.write_bytes(text.encode())
    return load_prompts(str(path), data, Letters(), limit)


def rows(count: int) -> list[PromptRow]:
    return [PromptRow(i, (i,), str(i), None) for i in range(count)]


def test_a_row_has_ids_text_answer_and_all_its_fields(tmp_path: Path) -> None:
    (row,) = load(tmp_path, '{"prompt": "ab", "answer": "c", "level": 3}\n')
    assert (row.row_id, row.prompt_ids, row.prompt_text, row.answer) == (0, (97, 98), "ab", "c")
    assert row.fields["level"] == 3


def test_byte_order_mark_crlf_and_blank_lines_are_no_rows(tmp_path: Path) -> None:
    found = load(tmp_path, '\ufeff{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert [row.prompt_text for row in found] == ["a", "b"]
    assert [row.answer for row in found] == [None, None]


def test_a_number_as_answer_becomes_text(tmp_path: Path) -> None:
    assert load(tmp_path, '{"prompt": "a", "answer": 42}')[0].answer == "42"


def test_chat_messages_go_through_the_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    (row,) = load(tmp_path, json.dumps({"prompt": messages}), replace(DATA, chat_template=True, system_prompt="s"))
    assert row.prompt_ids == (115, 2, 97, 2, 98, 2, 99, 2)
    assert row.prompt_text == "c"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a", "answer": "b"}', r"rows\.jsonl:2: no key 'prompt' \(keys present: question, answer\)"),
        ('{"prompt": "a"', r"rows\.jsonl:2: not valid JSON"),
        ('["a"]', r"rows\.jsonl:2: holds a list"),
        ('{"prompt": "  "}', r"rows\.jsonl:2: 'prompt' is empty"),
        ('{"prompt": 7}', r"rows\.jsonl:2: 'prompt' is neither a string nor a list of chat messages"),
        ('{"prompt": [{"role": "user"}]}', r"rows\.jsonl:2: 'prompt' is neither"),
        ('{"prompt": [{"role": "user", "content": "a"}]}', r"rows\.jsonl:2: .*data\.chat_template=false"),
        ('{"prompt": "a", "answer": ["b"]}', r"rows\.jsonl:2: 'answer' is a list"),
        ('{"prompt": "123456789"}', r"rows\.jsonl:2: the prompt has 9 tokens, more than rollout\.max_prompt_tokens=8"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(tmp_path, '{"prompt": "good"}\n' + line + "\n")


def test_a_prompt_of_just_the_limit_is_taken(tmp_path: Path) -> None:
    assert len(load(tmp_path, '{"prompt": "12345678"}')[0].prompt_ids) == 8


def test_no_rows_and_no_file_are_errors_of_their_own(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no prompts"):
        load(tmp_path, "\n\n")
    with pytest.raises(UserError, match="does not exist"):
        load_prompts(str(tmp_path / "absent.jsonl"), DATA, Letters(), 8)


def test_order_is_this_one_on_every_machine() -> None:
    assert epoch_order(8, seed=1234, epoch=0) == [5, 6, 3, 7, 4, 1, 2, 0]
    assert epoch_order(8, seed=1234, epoch=1) == [2, 0, 7, 6, 1, 4, 5, 3]


@pytest.mark.parametrize("num_rows", [1, 2, 7, 100])
def test_each_epoch_serves_each_row_once(num_rows: int) -> None:
    stream = PromptStream(rows(num_rows), seed=3)
    for epoch in range(3):
        served = [row.row_id for row in stream.next_batch(num_rows)]
        assert sorted(served) == list(range(num_rows))
        assert served == epoch_order(num_rows, 3, epoch)


def test_a_batch_goes_on_into_the_next_epoch_without_loss() -> None:
    stream = PromptStream(rows(5), seed=3)
    served = [row.row_id for _ in range(5) for row in stream.next_batch(3)]
    assert served == (epoch_order(5, 3, 0) + epoch_order(5, 3, 1) + epoch_order(5, 3, 2))


def test_a_batch_larger_than_the_data_repeats_it() -> None:
    stream = PromptStream(rows(2), seed=3, shuffle=False)
    assert [row.row_id for row in stream.next_batch(5)] == [0, 1, 0, 1, 0]


def test_a_resumed_stream_goes_on_with_the_very_next_row() -> None:
    straight, first, second = (PromptStream(rows(7), seed=5) for _ in range(3))
    wanted = [[row.row_id for row in straight.next_batch(3)] for _ in range(6)]
    head = [[row.row_id for row in first.next_batch(3)] for _ in range(3)]
    second.load_state(json.loads(json.dumps(first.state())))
    assert head + [[row.row_id for row in second.next_batch(3)] for _ in range(3)] == wanted


def test_resuming_with_other_data_is_refused() -> None:
    stream = PromptStream(rows(7), seed=5)
    with pytest.raises(UserError, match="has 6 rows and the saved run had 7"):
        PromptStream(rows(6), seed=5).load_state(stream.state())


def test_another_seed_gives_another_order() -> None:
    assert epoch_order(100, 1, 0) != epoch_order(100, 2, 0)
