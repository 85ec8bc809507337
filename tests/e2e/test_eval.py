"""Does `megappo eval` measure what training's validation measures, from a config, a folder or a checkpoint?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import Ended, Scene

pytestmark = [pytest.mark.slow]

DATA = ("data.validation=validation.jsonl", "reward.function=reward.py:share_of_even_digits", "eval.max_rows=12")
ENGINE = ("rollout.engine=hf", "rollout.max_new_tokens=6")


def responses(ended: Ended) -> list[dict[str, Any]]:
    folder = ended.run_dir.with_name(f"{ended.run_dir.name}_eval")
    return [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]


def results(ended: Ended) -> dict[str, Any]:
    return json.loads((ended.run_dir.with_name(f"{ended.run_dir.name}_eval") / "results.json").read_text())


@pytest.mark.vllm
@pytest.mark.distributed
def test_an_evaluation_of_the_config_is_the_first_validation_of_its_run(scene: Scene, main_run: Ended) -> None:
    ended = scene.run("measured", command="eval")
    assert responses(ended) == main_run.rollouts(0, "validation")
    rows = responses(ended)
    greedy = [row["reward"] for row in rows if row["temperature"] == 0]
    sampled = [row["reward"] for row in rows if row["temperature"] == 1]
    assert (len(greedy), len(sampled)) == (12, 24)
    found = results(ended)
    assert found["greedy_accuracy"] == pytest.approx(sum(greedy) / 12)
    assert found["avg_at_k"] == pytest.approx(sum(sampled) / 24)
    assert found["pass_at_k"]["1"] == pytest.approx(sum(reward >= 0.5 for reward in sampled) / 24)
    assert found["pass_at_k"]["2"] == pytest.approx(sum(max(sampled[i : i + 2]) >= 0.5 for i in range(0, 24, 2)) / 12)
    assert ended.stdout.splitlines() == [
        "rows: 12",
        f"greedy accuracy: {found['greedy_accuracy']:.4f}",
        f"avg@2: {found['avg_at_k']:.4f}",
        f"pass@1: {found['pass_at_k']['1']:.4f}",
        f"pass@2: {found['pass_at_k']['2']:.4f}",
        "responses: runs/measured_eval/responses.jsonl",
    ]


@pytest.mark.distributed
def test_a_folder_needs_no_config_and_another_engine_answers_alike(scene: Scene, main_run: Ended) -> None:
    ended = scene.run("alone", *DATA, *ENGINE, command="eval", config="model")
    assert [row["response_ids"] for row in responses(ended)] == [row["response_ids"] for row in main_run.greedy(0)]
    assert len(ended.stdout.splitlines()) == 3


@pytest.mark.distributed
def test_a_checkpoint_of_the_run_answers_as_its_last_validation_did(scene: Scene, main_run: Ended) -> None:
    checkpoint = main_run.run_dir / "checkpoints" / "latest"
    ended = scene.run("saved", *DATA, *ENGINE, command="eval", config=str(checkpoint))
    assert [row["response_ids"] for row in responses(ended)] == [row["response_ids"] for row in main_run.greedy(3)]


def test_a_second_evaluation_sets_the_first_aside_and_not_the_run(scene: Scene) -> None:
    run = scene.folder / "runs" / "twice"
    run.mkdir(parents=True)
    (run / "config.resolved.yaml").write_text("a training run\n")
    for _ in range(2):
        scene.run("twice", *DATA, *ENGINE, command="eval", config="model")
    assert (run / "config.resolved.yaml").read_text() == "a training run\n"
    assert {path.name for path in run.parent.glob("twice*")} == {"twice", "twice_eval", "twice_eval.1"}


@pytest.mark.parametrize(
    ("target", "overrides", "message"),
    [
        ("model", (), "data.validation is mandatory and not set; pass data.validation=VALUE"),
        ("model", (*DATA, "eval.samples=-1"), "eval.samples=-1 must be at least 0"),
        (
            "model",
            (*DATA, "rollout.max_prompt_tokens=200"),
            "rollout.max_prompt_tokens=200 + rollout.max_new_tokens=64 = 264 exceeds the model's max_position_embeddings=256",
        ),
        ("nothing", DATA, "config file 'nothing' does not exist; give the path of a YAML file"),
        ("runs", DATA, "model.path='runs' has no config.json"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(scene: Scene, target: str, overrides: tuple[str, ...], message: str) -> None:
    Path(scene.folder / "runs").mkdir(exist_ok=True)
    ended = scene.run("refused", *overrides, command="eval", config=target, expect=2)
    assert ended.stderr.startswith(message)
    assert not ended.run_dir.with_name("refused_eval").exists()
