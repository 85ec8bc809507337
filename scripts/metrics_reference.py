"""Writes docs/metrics.md from the table of metrics. `--check` only says whether the file is current (exit 1: not)."""

from __future__ import annotations

import sys
from pathlib import Path

from megappo.observe.metrics import METRICS, NAMED_METRICS

TARGET = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

HEAD = """# Metrics

<!-- Made by scripts/metrics_reference.py from METRICS in megappo/observe/metrics.py. Change that table, then run the script. -->

`metrics.jsonl` in the run folder has one row a step: `step`, counted from 1, then these keys where they are measured. What is not
finite is `null`. Keys under `timing_s/`, `perf/`, `memory/` and `checkpoint/` are times, speeds and sizes; all others are the
same for two runs of one config.

| key | |
|---|---|
"""


def reference() -> str:
    """The whole text of docs/metrics.md."""
    return HEAD + "".join(f"| `{key}` | {text} |\n" for key, text in (METRICS | NAMED_METRICS).items())


def main() -> int:
    text = reference()
    if "--check" in sys.argv[1:]:
        current = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text
        print(f"{TARGET.name} is {'current' if current else 'out of date: run scripts/metrics_reference.py'}")
        return 0 if current else 1
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
