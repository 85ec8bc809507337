"""Do rows become prompts with ids that travel, are bad ones named, and over-long ones treated as the policy says?"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megappo.config.schema_learning import DataConfig
from megappo.data.prompts import PromptRow, load_prompts
from megappo.data.stream import PromptStream
from megappo.data.tokenizer import Message
from megappo.errors import UserError

DATA = DataConfig()
CHAT = [{"role": "user", "content": "a"}]


class Letters:
    """One token a character; a chat message ends in 2."""

    bos_id, eos_ids, pad_id, vocab_size = 1, (2,), 0, 200

    def __init__(self, adds_bos: bool = False) -> None:
        self.adds_bos = adds_bos

    def encode(self, text: str, add_bos: bool = False) -> list[int]:
        return [1] * add_bos + [ord(c) for c in text]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return "".join(map(chr, ids))

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        return [i for message in messages for i in [*self.encode(message["content"]), 2]]


def load(folder: Path, text: str, data: DataConfig = DATA, limit: int = 8, adds_bos: bool = False) -> list[PromptRow]:
    path = folder / "rows.jsonl"
    path.write_bytes(text.encode())
    return load_prompts(str(path), data, Letters(adds_bos), limit)


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """The rows as a parquet file, or as a saved dataset where the name has no suffix."""
    import datasets

    made = datasets.Dataset.from_list(rows)
    if path.suffix:
        made.to_parquet(str(path))
    else:
        made.save_to_disk(str(path))
    return path


class TestRows:
    def test_a_row_has_ids_text_answer_and_all_its_fields(self, tmp_path: Path) -> None:
        (row,) = load(tmp_path, '{"prompt": "ab", "answer": "c", "level": 3}\n')
        assert (row.row_id, row.prompt_ids, row.prompt_text, row.answer) == (0, (97, 98), "ab", "c")
        assert row.fields["level"] == 3

    def test_a_number_as_answer_becomes_text_and_none_is_none(self, tmp_path: Path) -> None:
        rows = load(tmp_path, '{"prompt": "a", "answer": 42}\n{"prompt": "a"}\n{"prompt": "a", "answer": null}')
        assert [row.answer for row in rows] == ["42", None, None]

    def test_the_keys_are_those_of_the_config(self, tmp_path: Path) -> None:
        data = replace(DATA, prompt_key="q", answer_key="a", id_key="uid")
        (row,) = load(tmp_path, '{"q": "x", "a": "y", "uid": "z", "prompt": 1, "answer": [], "id": {}}', data)
        assert (row.prompt, row.answer, row.id) == ("x", "y", "z")

    def test_chat_messages_go_through_the_template(self, tmp_path: Path) -> None:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        (row,) = load(tmp_path, json.dumps({"prompt": messages}), replace(DATA, chat_template=True, system_prompt="s"))
        assert row.prompt_ids == (115, 2, 97, 2, 98, 2, 99, 2)
        assert row.prompt_text == "c"

    def test_a_key_that_parquet_adds_to_every_message_is_left_out_where_it_is_null(self, tmp_path: Path) -> None:
        rows = [{"prompt": [{"role": "user", "content": "a", "name": "Ann"}, {"role": "user", "content": "b"}]}]
        path = write_table(tmp_path / "a.parquet", rows)
        (row,) = load_prompts(str(path), replace(DATA, chat_template=True), Letters(), 8)
        assert row.prompt == ({"role": "user", "content": "a", "name": "Ann"}, {"role": "user", "content": "b"})


class TestIds:
    def test_an_own_id_travels_and_others_are_called_by_source_and_position(self, tmp_path: Path) -> None:
        rows = load(
            tmp_path, '{"prompt": "a", "id": "x-1"}\n\n{"prompt": "b", "id": 7}\n{"prompt": "c"}\n{"prompt": "d", "id": 7}'
        )
        source = str(tmp_path / "rows.jsonl")
        assert [row.id for row in rows] == ["x-1", "7", f"{source}:4", "7"]
        assert [row.position for row in rows] == [1, 3, 4, 5]
        assert {row.source for row in rows} == {source}

    def test_row_ids_count_on_over_the_sources_and_over_dropped_rows(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n{"prompt": "123456789"}\n{"prompt": "c"}\n')
        write_table(tmp_path / "b.parquet", [{"prompt": "d"}, {"prompt": "e"}])
        sources = (str(tmp_path / "a.jsonl"), str(tmp_path / "b.parquet"))
        rows = load_prompts(sources, replace(DATA, overlong="drop"), Letters(), 8)
        assert [(row.row_id, Path(row.source).name, row.position, row.prompt) for row in rows] == [
            (0, "a.jsonl", 1, "a"),
            (2, "a.jsonl", 3, "c"),
            (3, "b.parquet", 1, "d"),
            (4, "b.parquet", 2, "e"),
        ]


class TestBadRows:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ('{"question": "a", "answer": "b"}', r"rows\.jsonl:2: no key 'prompt' \(keys present: question, answer\)"),
            ("{}", r"rows\.jsonl:2: no key 'prompt' \(keys present: none\)"),
            ('{"prompt": "a"', r"rows\.jsonl:2: not valid JSON"),
            ('{"prompt": "  "}', r"rows\.jsonl:2: 'prompt' is empty"),
            ('{"prompt": null}', r"rows\.jsonl:2: 'prompt' is empty"),
            ('{"prompt": 7}', r"rows\.jsonl:2: 'prompt' is neither a string nor a list of chat messages"),
            ('{"prompt": []}', r"rows\.jsonl:2: 'prompt' is neither"),
            ('{"prompt": [{"role": "user"}]}', r"rows\.jsonl:2: 'prompt' is neither"),
            ('{"prompt": [{"role": "user", "content": "a"}]}', r"rows\.jsonl:2: .*data\.chat_template=false; set it to true"),
            ('{"prompt": "a", "answer": ["b"]}', r"rows\.jsonl:2: 'answer' is a list; .* set data\.answer_key"),
            ('{"prompt": "a", "id": {}}', r"rows\.jsonl:2: 'id' is a dict; .* set data\.id_key"),
            ('{"prompt": "a", "id": true}', r"rows\.jsonl:2: 'id' is a bool"),
        ],
    )
    def test_a_bad_row_is_named_by_file_and_line(self, tmp_path: Path, line: str, message: str) -> None:
        with pytest.raises(UserError, match=message):
            load(tmp_path, '{"prompt": "good"}\n' + line + "\n")

    @pytest.mark.parametrize("name", ["rows.parquet", "saved"])
    @pytest.mark.parametrize(
        ("rows", "message"),
        [
            ([{"question": "a"}], r" row 1: no key 'prompt' \(keys present: question\)"),
            ([{"prompt": "a"}, {"prompt": None}], r" row 2: 'prompt' is empty"),
            ([{"prompt": "a"}, {"prompt": ""}], r" row 2: 'prompt' is empty"),
            ([{"prompt": 1}], r" row 1: 'prompt' is neither a string nor"),
            ([{"prompt": CHAT}], r" row 1: .*data\.chat_template=false"),
            ([{"prompt": "a"}, {"prompt": "123456789"}], r" row 2: the prompt has 9 tokens"),
        ],
    )
    def test_a_bad_row_of_a_table_is_named_by_file_and_row(
        self, tmp_path: Path, name: str, rows: list[dict[str, Any]], message: str
    ) -> None:
        with pytest.raises(UserError, match=name.replace(".", r"\.") + message):
            load_prompts(str(write_table(tmp_path / name, rows)), DATA, Letters(), 8)

    def test_messages_that_the_template_refuses_are_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: Letters, messages: Sequence[Message]) -> list[int]:
            raise UserError("roles must alternate")

        monkeypatch.setattr(Letters, "render_chat", refuse)
        with pytest.raises(UserError, match=r"rows\.jsonl:1: roles must alternate"):
            load(tmp_path, '{"prompt": "a"}', replace(DATA, chat_template=True))

    def test_a_source_without_rows_is_an_error_of_its_own_also_beside_others(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"rows\.jsonl: holds no prompts"):
            load(tmp_path, "\n\n")
        (tmp_path / "good.jsonl").write_text('{"prompt": "a"}')
        with pytest.raises(UserError, match=r"rows\.jsonl: holds no prompts"):
            load_prompts((str(tmp_path / "good.jsonl"), str(tmp_path / "rows.jsonl")), DATA, Letters(), 8)


class TestOverlong:
    """Rows of 7, 8 and 9 tokens, and a limit of 8."""

    TEXT = "".join(json.dumps({"prompt": "123456789"[:length]}) + "\n" for length in (7, 8, 9))

    @pytest.mark.parametrize(
        ("policy", "prompts"),
        [
            ("drop", ["1234567", "12345678"]),
            ("truncate_left", ["1234567", "12345678", "23456789"]),
            ("truncate_right", ["1234567", "12345678", "12345678"]),
        ],
    )
    def test_only_the_row_beyond_the_limit_is_touched_and_counted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: Any, prompts: list[str]
    ) -> None:
        lines: list[str] = []
        monkeypatch.setattr(logging.getLogger("megappo"), "info", lambda line, *values: lines.append(line % values))
        rows = load(tmp_path, self.TEXT, replace(DATA, overlong=policy))
        assert ["".join(map(chr, row.prompt_ids)) for row in rows] == prompts
        assert [row.prompt_text for row in rows] == ["1234567", "12345678", "123456789"][: len(rows)]
        done = {"drop": "dropped", "truncate_left": "cut on the left", "truncate_right": "cut on the right"}[policy]
        path = tmp_path / "rows.jsonl"
        assert lines == [f"data.train: 1 of 3 prompts of {path} are longer than rollout.max_prompt_tokens=8: {done}"]

    def test_fail_names_the_line_and_the_ways_out(self, tmp_path: Path) -> None:
        with pytest.raises(UserError) as caught:
            load(tmp_path, self.TEXT)
        assert "rows.jsonl:3: the prompt has 9 tokens, more than rollout.max_prompt_tokens=8; " in str(caught.value)
        assert "data.overlong" in str(caught.value)

    def test_the_limit_counts_the_template(self, tmp_path: Path) -> None:
        data = replace(DATA, chat_template=True, overlong="truncate_left")
        assert [len(row.prompt_ids) for row in load(tmp_path, self.TEXT, data)] == [8, 8, 8]  # 7 + 1, 8 + 1, 9 + 1
        assert [row.prompt_ids[-1] for row in load(tmp_path, self.TEXT, data)] == [2, 2, 2]

    @pytest.mark.parametrize(
        ("policy", "limit", "ids"),
        [
            ("truncate_left", 3, (1, ord("b"), ord("c"))),
            ("truncate_left", 1, (1,)),
            ("truncate_right", 3, (1, ord("a"), ord("b"))),
        ],
    )
    def test_bos_is_kept(self, tmp_path: Path, policy: Any, limit: int, ids: tuple[int, ...]) -> None:
        (row,) = load(tmp_path, '{"prompt": "abc"}', replace(DATA, overlong=policy), limit, adds_bos=True)
        assert row.prompt_ids == ids

    def test_dropping_all_of_a_source_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"rows\.jsonl: all 2 prompts are longer than rollout\.max_prompt_tokens=6"):
            load(tmp_path, self.TEXT.split("\n", 1)[1], replace(DATA, overlong="drop"), limit=6)

    def test_nothing_is_logged_where_all_fit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(logging.getLogger("megappo"), "info", None)
        assert len(load(tmp_path, self.TEXT, replace(DATA, overlong="drop"), limit=9)) == 3


def test_the_worked_example_of_the_docs_gives_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("megappo"), "info", lambda line, *values: lines.append(line % values))
    monkeypatch.chdir(tmp_path)
    exec(page.split("```python file=make_data.py\n")[1].split("```")[0], {})
    rows = load_prompts(("sums.jsonl", "products.parquet"), replace(DATA, overlong="drop"), Letters(), 64)
    assert lines == ["data.train: 1 of 31 prompts of sums.jsonl are longer than rollout.max_prompt_tokens=64: dropped"]
    stream = PromptStream(rows, seed=1, weights=(3, 1))
    served = [row.id for row in stream.next_batch(44)]
    assert sum(name.startswith("sum-") for name in served[:4]) == 3
    products = [name for name in served if name.startswith("products.parquet:")]
    assert set(products[:2]) == set(products[2:4]) == {"products.parquet:1", "products.parquet:2"}
    assert len({name for name in served[:40] if name.startswith("sum-")}) == 30
