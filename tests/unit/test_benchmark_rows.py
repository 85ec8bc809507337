"""What do the parts of the algorithms' benchmark say with peers, and what without? Their rows follow from what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from benchmarks import algorithms, algorithms_batches, algorithms_gae, algorithms_heads, algorithms_workers, parts, peers
from benchmarks import report as report_module
from benchmarks.report import Row, beside

MS = 1e-3


def by_name(rows: list[Row]) -> dict[str, Row]:
    return {row.what: row for row in rows}


def test_a_row_whose_peer_is_absent_has_no_verdict_and_says_so() -> None:
    assert beside("a_vs_verl", {"ours": 2 * MS, "peer": 12 * MS}, "verl", 5) == Row(
        "a_vs_verl", 2.0, 12.0, "ms", 6.0, "ratio >= 5", True
    )
    assert beside("a_vs_verl", {"ours": 2 * MS, "peer": 8 * MS}, "verl", 5).met is False
    alone = beside("a_vs_verl", {"ours": 2 * MS}, "verl", 5)
    assert alone == Row("a_vs_verl", 2.0, None, "ms", None, "ratio >= 5 (no verl here)", None)
    assert beside("a_vs_verl", {"ours": 2 * MS}, "verl").goal is None


def test_a_peer_that_cannot_be_imported_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "versions", {})
    adapter = ModuleType("benchmarks.peers.somebody")
    adapter.version = lambda: "1.2"  # type: ignore[attr-defined]

    def missing() -> None:
        raise ImportError("No module named 'somebody'")

    assert peers.optional(adapter, missing) is None
    assert peers.versions == {}
    assert capsys.readouterr().out == "peer somebody: skipped (not installed): No module named 'somebody'\n"
    assert peers.optional(adapter, lambda: "function") == "function"
    assert peers.versions == {"somebody": "1.2"}


def gae(peer: bool) -> dict[str, Any]:
    seconds = {"ours": 4 * MS, "fallback": 8 * MS} | ({"peer": 160 * MS} if peer else {})
    return {"256x2048": seconds, "64x32768": seconds, "512x1024": {"ours": 1 * MS} | ({"peer": 1.5 * MS} if peer else {})}


def test_advantages_and_their_fallback_are_judged_apart() -> None:
    rows = by_name(algorithms_gae.rows(gae(peer=True)))
    assert list(rows) == [
        "gae_256x2048_vs_verl",
        "gae_64x32768_vs_verl",
        "gae_512x1024_vs_slime",
        "gae_256x2048_fallback_vs_verl",
        "gae_64x32768_fallback_vs_verl",
    ]
    assert [(row.ratio, row.met) for row in rows.values()] == [(40, True), (40, False), (1.5, False), (20, True), (20, True)]
    assert all(row.met is None and row.ours for row in algorithms_gae.rows(gae(peer=False)))


def test_batches_are_judged_by_the_worst_lengths_and_the_worst_batch() -> None:
    found = {
        "balance": {
            "even": {"seconds": {"ours": 1 * MS, "peer": 9 * MS}, "imbalance": [[1e-6, 2e-6], [3e-5, 1e-5]]},
            "odd": {"seconds": {"ours": 2 * MS, "peer": 8 * MS}, "imbalance": [[0.0, 0.2]]},
        },
        "packing": {
            "even": {"seconds": {"ours": 1 * MS, "peer": 9 * MS}, "groups": [[10, 10], [11, 10]]},
            "odd": {"seconds": {"ours": 1 * MS, "peer": 3 * MS}, "groups": [[90, 100]]},
        },
    }
    rows = by_name(algorithms_batches.rows(found))
    assert (rows["balance_time_vs_verl"].ratio, rows["balance_time_vs_verl"].met) == (4, False)
    excess = rows["balance_excess_over_verl"]
    assert (round(excess.ours, 9), excess.goal, excess.met) == (2e-5, "<= 1e-05 of the mean", False)
    long_tail = rows["balance_long_tail_vs_verl"]
    assert (long_tail.ours, long_tail.peer) == (0.0, 0.2)
    assert (rows["packing_vs_nemo"].ratio, rows["packing_vs_nemo"].met) == (3, True)
    groups = rows["packing_groups_over_nemo"]
    assert (groups.ours, groups.peer, groups.met) == (11, 10, False)


def test_batches_without_peers_are_measured_and_not_judged() -> None:
    found = {
        "balance": {
            "even": {"seconds": {"ours": 1 * MS}, "imbalance": [[1e-6], [3e-5]]},
            "odd": {"seconds": {"ours": 2 * MS}, "imbalance": [[0.0]]},
        },
        "packing": {"even": {"seconds": {"ours": 1 * MS}, "groups": [[10], [11]]}},
    }
    rows = by_name(algorithms_batches.rows(found))
    assert all(row.met is None and row.peer is None for row in rows.values())
    assert rows["balance_time_vs_verl"].ours == 2
    assert (rows["balance_excess_over_verl"].ours, rows["packing_groups_over_nemo"].ours) == (3e-5, 11)


def heads(peer: bool) -> dict[str, Any]:
    return {
        "logits": {"seconds": {"ours": 1.0} | ({"peer": 4.0} if peer else {}), "extra_bytes": 6_000_000, "bytes": 100_000_000},
        "hidden": {
            "seconds": {"forward": 3.0, "matmul": 2.0, "all": 9.0, "matmuls": 3.0},
            "bytes": {"ours": 2_000_000, "plain": 50_000_000},
        },
    }


def test_the_output_head_is_judged_by_verl_by_the_logits_and_by_matmuls() -> None:
    rows = by_name(algorithms_heads.rows(heads(peer=True)))
    assert {name: (row.ratio, row.met) for name, row in rows.items()} == {
        "logprob_entropy_vs_verl": (4, True),
        "logprob_entropy_memory_over_logits": (0.06, False),
        "hidden_forward_over_matmul": (1.5, True),
        "hidden_all_over_matmuls": (3, False),
        "hidden_memory_vs_logits": (25, True),
    }
    assert by_name(algorithms_heads.rows(heads(peer=False)))["logprob_entropy_vs_verl"].met is None


def test_batches_to_workers_are_judged_whole_and_only_shown_in_quarters() -> None:
    seconds = {"ours": 1.0, "peer": 25.0}
    rows = by_name(algorithms_workers.rows({"whole": seconds, "quarters": seconds}))
    assert rows["batch_to_workers_vs_pickle"].met is True
    assert rows["batch_rows_to_workers_vs_pickle"].met is None
    assert all(row.met is None for row in algorithms_workers.rows({"whole": {"ours": 1.0}, "quarters": {"ours": 1.0}}))


def test_a_part_answers_through_a_file_and_its_failure_ends_the_run(tmp_path: Path) -> None:
    python = tmp_path / "python"
    answer = {"peers": {}}
    python.write_text(
        f"#!{sys.executable}\nimport sys, json\n"
        "assert sys.argv[1:5] == ['-W', 'ignore', '-m', 'benchmarks.some_part']\n"
        "if sys.argv[5] == 'fails': sys.exit(3)\n"
        f"open(sys.argv[-1], 'w').write({json.dumps(answer)!r})\n"
    )
    python.chmod(0o755)
    assert parts.run("some_part", "works", python=str(python)) == answer
    with pytest.raises(SystemExit, match="some_part fails failed"):
        parts.run("some_part", "fails", python=str(python))


def test_one_table_holds_all_parts_and_the_versions_of_their_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGAPPO_PEERS_PY", "/peers/python")
    monkeypatch.setattr(report_module, "RESULTS", tmp_path)
    asked: list[tuple[str, str]] = []

    def run(name: str, python: str) -> dict[str, Any]:
        asked.append((name, python))
        return {"peers": {name: "1"}, "seconds": {"ours": 1.0}}

    monkeypatch.setattr(algorithms, "run", run)
    part = SimpleNamespace(rows=lambda found: [beside("a_vs_b", found["seconds"], "b", 2)])
    monkeypatch.setattr(algorithms, "PARTS", {"one": part, "two": part})
    algorithms.main()
    written = json.loads((tmp_path / "algorithms.json").read_text())
    assert asked == [("one", "/peers/python"), ("two", "/peers/python")]
    assert [row["goal"] for row in written["rows"]] == ["ratio >= 2 (no b here)"] * 2
    assert {"one": "1", "two": "1"}.items() <= written["versions"].items()
