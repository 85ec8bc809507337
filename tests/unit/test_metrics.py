"""Are metrics and rollouts on disk as they were measured, and documented?"""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
import torch

from megappo.errors import UserError
from megappo.observe.metrics import METRICS, MetricsWriter, is_deterministic, read_metrics
from megappo.observe.progress import Progress, step_line
from megappo.observe.rollouts import RolloutRow, write_rollouts
from megappo.observe.trackers import open_trackers


def test_a_row_starts_with_the_step_and_is_on_disk_at_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.log(1, {"reward/mean": torch.tensor(0.5), "actor/lr": 1e-6, "weights/version": 2})
    assert path.read_text() == '{"step": 1, "actor/lr": 1e-06, "reward/mean": 0.5, "weights/version": 2}\n'
    writer.log(2, {"reward/mean": 1})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    writer.close()
    writer.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), torch.tensor(float("nan"))])
def test_what_is_not_finite_is_null(tmp_path: Path, value) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.log(1, {"reward/mean": value})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": None}]
    writer.close()


def test_a_later_writer_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        writer = MetricsWriter(tmp_path / "metrics.jsonl")
        writer.log(step, {})
        writer.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]


def test_every_metric_of_the_design_is_documented() -> None:
    design = {
        "reward/mean",
        *(f"actor/{x}" for x in ("pg_loss", "approx_kl", "clipfrac", "entropy", "grad_norm", "lr", "param_norm_delta")),
        *(f"critic/{x}" for x in ("vf_loss", "explained_variance")),
        *(f"rollout/{x}" for x in ("response_length_mean", "truncated_fraction", "logprob_diff_max")),
        *(f"weights/{x}" for x in ("version", "bytes")),
        *(
            f"timing_s/{x}"
            for x in ("rollout", "reward", "log_prob", "values", "update_critic", "update_actor", "publish", "step")
        ),
        "perf/tokens_per_second",
    }
    assert design <= set(METRICS)
    assert all(text.endswith(".") and "\n" not in text for text in METRICS.values())


def test_times_and_speeds_are_the_only_keys_that_may_differ_between_equal_runs() -> None:
    assert not any(map(is_deterministic, ["timing_s/step", "perf/mfu", "memory/peak", "checkpoint/bytes"]))
    assert all(map(is_deterministic, ["reward/mean", "weights/bytes", "actor/lr"]))


def row(**changes: object) -> RolloutRow:
    values: dict[str, object] = {
        "sample_id": 7,
        "row_id": 4,
        "id": "sum-4",
        "source": "sums.jsonl",
        "position": 5,
        "prompt_ids": (1, 2),
        "response_ids": (3, 4, 5),
        "logprobs": (-0.5, -1.0, -0.25),
        "weight_version": 3,
        "finish_reason": "stop",
        "reward": 1.0,
        "reward_parts": {"style": 0.25, "length": float("nan")},
        "skipped": False,
        "learnt": True,
        "temperature": 1.0,
        "prompt": "1+1=",
        "response": "2\n",
        "answer": "2",
    }
    return RolloutRow(**{**values, **changes})  # type: ignore[arg-type]


def test_a_dump_has_one_row_a_sample(tmp_path: Path) -> None:
    path = write_rollouts(tmp_path / "rollouts", 1, [row(), row(sample_id=8, response="ü\u2028", reward=float("nan"))])
    assert path == tmp_path / "rollouts" / "step_000001.jsonl"
    first, second = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    assert first == {
        "sample_id": 7,
        "row_id": 4,
        "id": "sum-4",
        "source": "sums.jsonl",
        "position": 5,
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "logprobs": [-0.5, -1.0, -0.25],
        "weight_version": 3,
        "finish_reason": "stop",
        "reward": 1.0,
        "reward_parts": {"style": 0.25, "length": None},
        "skipped": False,
        "learnt": True,
        "temperature": 1.0,
        "prompt": "1+1=",
        "response": "2\n",
        "answer": "2",
    }
    assert (second["response"], second["reward"]) == ("ü\u2028", None)


def test_a_dump_that_fails_half_way_leaves_no_step_file(tmp_path: Path) -> None:
    def rows():
        yield row()
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        write_rollouts(tmp_path, 1, rows())
    assert not (tmp_path / "step_000001.jsonl").exists()


def test_a_step_is_one_line_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(logging.getLogger("megappo"), "info", lines.append)
    with Progress(20, io.StringIO()) as progress:
        progress.update(3, {"reward/mean": 0.25, "timing_s/step": 1.5, "actor/lr": 1.0})
    assert lines == ["step 3/20  reward 0.250  s/step 1.50"]
    assert step_line(1, 2, {}) == "step 1/2"


def test_a_terminal_gets_a_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    with Progress(4, terminal) as progress:
        for step in range(1, 5):
            progress.update(step, {"reward/mean": step / 8})
    assert "4/4" in terminal.getvalue()
    assert "reward 0.500" in terminal.getvalue()


def test_trackers_all_get_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trackers = open_trackers(tmp_path, ["tensorboard"])
    for step in (1, 2):
        trackers.log(step, {"reward/mean": step / 2, "critic/explained_variance": float("nan")})
    trackers.close()
    assert [row["reward/mean"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0.5, 1.0]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"]
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.5), (2, 1.0)]


def test_a_tracker_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megappo.observe.trackers.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs tensorboard; install megappo with the extra `trackers`"):
        open_trackers(tmp_path, ["tensorboard"])
