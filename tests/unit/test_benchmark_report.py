"""What do the rows of a benchmark say? Ratios and verdicts follow from the numbers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import report as report_module
from benchmarks.report import over, report, row


def test_vs_rows_say_how_many_times_faster_ours_is() -> None:
    fast = row("handover_vs_peer", 2.0, "ms", 50.0, min_ratio=20)
    assert (fast.ratio, fast.goal, fast.met) == (25.0, "ratio >= 20", True)
    assert row("handover_vs_peer", 2.5, "ms", 50.0, min_ratio=20).met is True
    assert row("handover_vs_peer", 2.6, "ms", 50.0, min_ratio=20).met is False
    assert row("handover_vs_peer", 2.0, "ms", None, min_ratio=20).met is False


def test_over_rows_say_what_part_of_the_bound_ours_is() -> None:
    at_the_bound = over("memory_over_bound", 30.0, "MB", 30.0, at_most=1)
    assert (at_the_bound.ratio, at_the_bound.goal, at_the_bound.met) == (1.0, "ratio <= 1", True)
    assert over("load_over_own", 50.0, "ms", 20.0, at_most=2).ratio == 2.5
    assert over("load_over_own", 50.0, "ms", 20.0, at_most=2).met is False
    assert over("bytes_over_formula", 0.0, "bytes", 20.0, at_most=1).met is True
    assert over("bytes_over_formula", 7.0, "bytes", 0.0, at_most=1).met is False


def test_counts_are_judged_by_themselves_and_rows_without_a_goal_not_at_all() -> None:
    assert row("object_collectives", 0, "calls", 442, at_most=0).met is True
    assert row("object_collectives", 1, "calls", 442, at_most=0).met is False
    for_information = row("pack_vs_cat", 2.0, "ms", 3.0)
    assert (for_information.ratio, for_information.goal, for_information.met) == (1.5, None, None)
    assert over("x_over_y", 2.0, "ms", 4.0).met is None


def test_the_file_holds_rows_versions_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "RESULTS", tmp_path)
    rows = [row("a_vs_b", 2.0, "ms", 50.0, min_ratio=20), over("a_over_b", 1.0, "MB", 2.0, at_most=1)]
    written = json.loads(report("name", rows, versions={"slime": "0.3.1"}).read_text())
    assert written["rows"] == [asdict(each) for each in rows]
    assert set(written["rows"][0]) == {"what", "ours", "peer", "unit", "ratio", "goal", "met"}
    assert written["versions"]["slime"] == "0.3.1"
    assert {"torch", "python", "megappo"} <= set(written["versions"])
    assert {"processor", "cores", "load_1min"} <= set(written["machine"])
