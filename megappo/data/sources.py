"""What rows does a source of data hold? `source_rows`: JSONL, parquet, datasets on disk and generated tasks as one kind of row.

A source is what the user names in `data.train`: a `.jsonl` or `.json` file, a `.parquet` file, a folder of `.parquet` files, a
folder written by `Dataset.save_to_disk`, or `reasoning_gym:TASK`. pyarrow and datasets are imported only where one is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from megappo.config.schema_learning import DataConfig
from megappo.data.tasks import TASK_PREFIX, task_rows
from megappo.errors import UserError

Kind = Literal["task", "jsonl", "parquet", "parquet folder", "dataset"]
Row = tuple[str, int, Mapping[str, Any]]
"""(where, for messages; position in the source as a person counts, from 1; the row as plain Python)."""

KINDS = f"a .jsonl or .parquet file, a folder of .parquet files, a folder written by Dataset.save_to_disk, or {TASK_PREFIX}TASK"
_SUFFIXES: Mapping[str, Kind] = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_SPLIT_FILE = re.compile(r"(.+)-\d{5}-of-\d{5}")
_ROWS_AT_ONCE = 1024


def source_list(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The sources that `data.train` or `data.validation` names."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def source_kind(source: str) -> Kind:
    """What kind of source this is, from names and sizes alone. Raises UserError for one that is missing, empty or no source."""
    if source == TASK_PREFIX:
        raise UserError(f"{source!r} names no task; give one, e.g. {TASK_PREFIX}basic_arithmetic")
    if source.startswith(TASK_PREFIX):
        return "task"
    path = Path(source)
    if path.is_dir():
        return _folder_kind(source, path)
    if not path.is_file():
        raise UserError(f"{source!r} does not exist; give {KINDS}, relative to the current directory")
    kind = _SUFFIXES.get(path.suffix)
    if kind is None:
        raise UserError(f"{source!r} is of no known kind; give {KINDS}")
    if path.stat().st_size == 0:
        raise UserError(f"{source!r} is an empty file; give one with prompts")
    return kind


def source_rows(source: str, data: DataConfig, seed: int) -> Iterator[Row]:
    """The rows of a source, in its order. `seed` decides the rows of a generated task.

    Raises UserError that names file and line (or row) where something cannot be read."""
    match source_kind(source):
        case "task":
            yield from task_rows(source, data, seed)
        case "jsonl":
            yield from _jsonl_rows(source)
        case "parquet":
            yield from _parquet_rows([Path(source)])
        case "parquet folder":
            yield from _parquet_rows(_parquet_files(Path(source)))
        case "dataset":
            yield from _dataset_rows(source)


def _folder_kind(source: str, path: Path) -> Kind:
    if (path / "dataset_dict.json").is_file():
        splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8")).get("splits", [])
        raise UserError(f"{source!r} holds the splits {', '.join(splits)}; give one of them, e.g. {path / (*splits, 'train')[0]}")
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        return "dataset"
    files = _parquet_files(path)
    if not files:
        raise UserError(f"{source!r} is a folder with neither .parquet files nor a saved dataset in it; give {KINDS}")
    splits = sorted({match[1] for file in files if (match := _SPLIT_FILE.fullmatch(file.stem))})
    if len(splits) > 1:
        raise UserError(f"{source!r} holds .parquet files of the splits {', '.join(splits)}; name the files of one as a list")
    return "parquet folder"


def _parquet_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))


def _jsonl_rows(source: str) -> Iterator[Row]:
    """The object on each line that is not blank; its position is the number of the line."""
    try:
        content = Path(source).read_bytes()
    except OSError as error:
        raise UserError(f"{source!r} cannot be read ({error.strerror}); give the path of a JSONL file") from None
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"{source}:{number}"
        try:
            line = raw.decode("utf-8")
            if not line.strip():
                continue
            row = json.loads(line)
            if "\\ud" in line.lower():
                json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{where}: holds half of a surrogate pair (\\ud800 to \\udfff), which is no text; mend it") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: not UTF-8 (byte {error.start + 1} of the line); write the file in UTF-8") from None
        except ValueError as error:
            raise UserError(f"{where}: not valid JSON ({error}); each line must be one JSON object") from None
        if not isinstance(row, dict):
            raise UserError(f"{where}: holds a {type(row).__name__}, not an object; each line must be one JSON object")
        yield where, number, row


def _parquet_rows(files: Iterable[Path]) -> Iterator[Row]:
    """The rows of all files; positions count on from one file to the next, `where` counts in the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    before = 0
    for file in files:
        number = 0
        try:
            with pq.ParquetFile(file) as opened:
                for batch in opened.iter_batches(_ROWS_AT_ONCE):
                    for row in _plain_rows(batch, str(file), number):
                        number += 1
                        yield f"{file} row {number}", before + number, row
        except (OSError, pa.ArrowException) as error:
            after = f" after row {number}" if number else ""
            raise UserError(f"{file}: not readable as parquet{after} ({_first_line(error)}); write the file again") from None
        before += number


def _dataset_rows(source: str) -> Iterator[Row]:
    """The rows of a dataset on disk. Columns are not decoded: an image stays the bytes and the path that were saved."""
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    number = 0
    try:
        dataset = datasets.load_from_disk(source)
        for table in dataset.with_format("arrow").iter(_ROWS_AT_ONCE):
            for row in _plain_rows(table, source, number):
                number += 1
                yield f"{source} row {number}", number, row
    except (OSError, KeyError, TypeError, pa.ArrowException) as error:
        raise UserError(f"{source}: not readable as a saved dataset ({_first_line(error)}); save it again") from None


def _plain_rows(table: Any, where: str, before: int) -> list[dict[str, Any]]:
    """The rows of a pyarrow batch or table as plain Python. `before`: rows of `where` that came before it."""
    try:
        return table.to_pylist()  # type: ignore[no-any-return]
    except UnicodeDecodeError:
        for i in range(table.num_rows):
            try:
                table.slice(i, 1).to_pylist()
            except UnicodeDecodeError as error:
                raise UserError(f"{where} row {before + i + 1}: holds text that is not UTF-8 ({error.reason}); mend it") from None
        raise


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
