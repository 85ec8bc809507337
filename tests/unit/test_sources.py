"""Does every kind of source give its rows as plain Python, and is a bad row named by file and line?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megappo.config.schema_learning import DataConfig
from megappo.data.sources import source_kind, source_rows
from megappo.errors import UserError

DATA = DataConfig()
ROWS = [
    {"prompt": "1+1=", "answer": "2", "tags": ["a", "b"], "level": 1},
    {"prompt": "2+2=", "answer": None, "tags": [], "level": 2},
    {"prompt": "ü€", "answer": "", "tags": ["c"], "level": 3},
]
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def rows_of(path: Path) -> list[tuple[str, int, Any]]:
    return list(source_rows(str(path), DATA, seed=0))


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)


def write_dataset(path: Path, rows: list[dict[str, Any]]) -> None:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(path), num_shards=2)


@pytest.mark.parametrize(
    ("name", "write", "where"),
    [
        ("rows.jsonl", write_jsonl, "rows.jsonl:2"),
        ("rows.json", write_jsonl, "rows.json:2"),
        ("rows.parquet", write_parquet, "rows.parquet row 2"),
        ("saved", write_dataset, "saved row 2"),
    ],
)
class TestEveryKind:
    def test_rows_are_those_that_were_written(
        self, tmp_path: Path, name: str, write: Callable[[Path, list[dict[str, Any]]], None], where: str
    ) -> None:
        write(tmp_path / name, ROWS)
        found = rows_of(tmp_path / name)
        assert [row for _, _, row in found] == ROWS
        assert [position for _, position, _ in found] == [1, 2, 3]
        assert found[1][0] == str(tmp_path / where)

    def test_chat_messages_are_lists_of_dicts(
        self, tmp_path: Path, name: str, write: Callable[[Path, list[dict[str, Any]]], None], where: str
    ) -> None:
        write(tmp_path / name, [{"prompt": CHAT}, {"prompt": CHAT[1:]}])
        prompts = [row["prompt"] for _, _, row in rows_of(tmp_path / name)]
        assert prompts == [CHAT, CHAT[1:]]
        assert all(type(prompt) is list and type(message) is dict for prompt in prompts for message in prompt)


class TestJsonl:
    def test_byte_order_mark_crlf_and_blank_lines_are_no_rows(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": "x\xe2\x80\xa8y"}')
        assert [(position, row) for _, position, row in rows_of(tmp_path / "a.jsonl")] == [(1, {"a": 1}), (4, {"a": "x\u2028y"})]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b'{"a": 1', r"a\.jsonl:3: not valid JSON \(Expecting"),
            (b"[1]", r"a\.jsonl:3: holds a list, not an object"),
            (b'"a"', r"a\.jsonl:3: holds a str"),
            (b'{"a": "\xff"}', r"a\.jsonl:3: not UTF-8 \(byte 8 of the line\)"),
            (b'{"a": "\\uD83D"}', r"a\.jsonl:3: holds half of a surrogate pair"),
        ],
    )
    def test_a_broken_third_line_is_named(self, tmp_path: Path, line: bytes, message: str) -> None:
        (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{"a": 2}\n' + line + b'\n{"a": 4}\n')
        with pytest.raises(UserError, match=message):
            rows_of(tmp_path / "a.jsonl")

    def test_a_whole_surrogate_pair_is_text(self, tmp_path: Path) -> None:
        (tmp_path / "a.jsonl").write_text('{"a": "\\ud83d\\ude00"}')
        assert rows_of(tmp_path / "a.jsonl")[0][2] == {"a": "😀"}


class TestParquet:
    def test_a_folder_gives_its_files_in_order_and_counts_on(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "b.parquet", ROWS[2:])
        write_parquet(tmp_path / "a.parquet", ROWS[:2])
        (tmp_path / "README.md").touch()
        found = rows_of(tmp_path)
        assert [row for _, _, row in found] == ROWS
        assert [(Path(where).name, position) for where, position, _ in found] == [
            ("a.parquet row 1", 1),
            ("a.parquet row 2", 2),
            ("b.parquet row 1", 3),
        ]

    def test_rows_come_from_all_batches(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "a.parquet", [{"a": i} for i in range(2500)])
        assert [(position, row["a"]) for _, position, row in rows_of(tmp_path / "a.parquet")] == [(i + 1, i) for i in range(2500)]

    def test_a_file_that_is_no_parquet_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "a.parquet").write_bytes(b"PAR1 and then something else")
        with pytest.raises(UserError, match=r"a\.parquet: not readable as parquet \("):
            rows_of(tmp_path / "a.parquet")

    def test_a_file_with_a_damaged_page_is_named(self, tmp_path: Path) -> None:
        write_parquet(tmp_path / "a.parquet", ROWS)
        content = bytearray((tmp_path / "a.parquet").read_bytes())
        content[4:40] = b"\xff" * 36
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(UserError, match=r"a\.parquet: not readable as parquet"):
            rows_of(tmp_path / "a.parquet")

    def test_text_that_is_not_utf8_is_named_by_row(self, tmp_path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        raw = pa.array([b"good", b"bad \xff", b"good"]).view(pa.string())
        pq.write_table(pa.table({"prompt": raw}), tmp_path / "a.parquet")
        with pytest.raises(UserError, match=r"a\.parquet row 2: holds text that is not UTF-8"):
            rows_of(tmp_path / "a.parquet")


class TestDataset:
    def test_a_selection_of_rows_keeps_its_order(self, tmp_path: Path) -> None:
        import datasets

        datasets.Dataset.from_list(ROWS).select([2, 0]).save_to_disk(str(tmp_path / "saved"))
        assert [row for _, _, row in rows_of(tmp_path / "saved")] == [ROWS[2], ROWS[0]]

    def test_a_split_of_a_dataset_dict_is_a_source_and_the_whole_is_none(self, tmp_path: Path) -> None:
        import datasets

        one = datasets.Dataset.from_list(ROWS)
        datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "both"))
        with pytest.raises(UserError, match=r"both' holds the splits train, test; give one of them, e\.g\. .*both/train$"):
            source_kind(str(tmp_path / "both"))
        assert len(rows_of(tmp_path / "both" / "train")) == 3

    def test_a_missing_shard_is_refused(self, tmp_path: Path) -> None:
        write_dataset(tmp_path / "saved", ROWS)
        next((tmp_path / "saved").glob("*.arrow")).unlink()
        with pytest.raises(UserError, match=r"saved: not readable as a saved dataset"):
            rows_of(tmp_path / "saved")

    def test_a_damaged_shard_is_refused(self, tmp_path: Path) -> None:
        write_dataset(tmp_path / "saved", ROWS)
        shard = next((tmp_path / "saved").glob("*.arrow"))
        shard.write_bytes(b"\xff" * 100)
        with pytest.raises(UserError, match=r"saved: not readable as a saved dataset"):
            rows_of(tmp_path / "saved")


class TestKind:
    def test_a_kind_is_told_without_reading_and_without_pyarrow(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import builtins

        real = builtins.__import__

        def without_heavy(name: str, *rest: Any) -> Any:
            assert name.partition(".")[0] not in ("pyarrow", "datasets", "torch")
            return real(name, *rest)

        write_parquet(tmp_path / "train-00000-of-00001.parquet", ROWS)
        write_dataset(tmp_path / "saved", ROWS)
        monkeypatch.setattr(builtins, "__import__", without_heavy)
        assert source_kind(str(tmp_path)) == "parquet folder"
        assert source_kind(str(tmp_path / "saved")) == "dataset"
        assert source_kind("reasoning_gym:chain_sum") == "task"

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("absent.jsonl", r"absent\.jsonl' does not exist; give a \.jsonl or \.parquet file"),
            ("rows.csv", r"rows\.csv' is of no known kind; give"),
            ("empty.jsonl", r"empty\.jsonl' is an empty file"),
            ("empty.parquet", r"empty\.parquet' is an empty file"),
            ("nothing", r"nothing' is a folder with neither \.parquet files nor a saved dataset"),
        ],
    )
    def test_what_is_no_source_is_refused(self, tmp_path: Path, name: str, message: str) -> None:
        (tmp_path / "nothing").mkdir()
        (tmp_path / "rows.csv").write_text("prompt\n1+1=\n")
        (tmp_path / "empty.jsonl").touch()
        (tmp_path / "empty.parquet").touch()
        with pytest.raises(UserError, match=message):
            source_kind(str(tmp_path / name))

    def test_a_folder_with_the_files_of_several_splits_is_refused(self, tmp_path: Path) -> None:
        for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
            write_parquet(tmp_path / f"{name}.parquet", ROWS)
        with pytest.raises(UserError, match=r"holds \.parquet files of the splits test, train; name the files of one as a list"):
            source_kind(str(tmp_path))
