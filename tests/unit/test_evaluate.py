"""Do the figures of an evaluation follow from its responses, with every row counted and skipped ones left out?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megappo.config.schema import Config, EvalConfig, RolloutConfig
from megappo.config.schema_learning import RewardConfig
from megappo.data.prompts import PromptRow
from megappo.data.tokenizer import load_tokenizer
from megappo.pp_weights.assemble import deliver
from megappo.pp_weights.buffer import WeightBuffer, build_manifest, weight_buffer_meta
from megappo.rewards.score import Scorer, Scores
from megappo.rollout.engine import Completion
from megappo.rollout.hf_engine import HfEngine
from megappo.trainer.evaluate import Evaluated, Evaluation, Responses
from megappo.trainer.evaluate_command import result_lines, results
from megappo.trainer.rollout import Sample
from tests.models import make_llama_folder
from tests.unit.test_tokenizer import make_sentencepiece


def responses(values: Sequence[float], per_row: int, skipped: Sequence[int] = ()) -> Responses:
    bad = tuple(i in skipped for i in range(len(values)))
    row = PromptRow(row_id=0, prompt_ids=(1,), prompt="a", answer="b", source="x.jsonl", position=1, id="x.jsonl:1")
    sample = Sample(row, Completion((2,), (-1.0,), "stop", 0), "b", 0.0)
    scores = Scores(values=tuple(values), failed=bad, skipped=bad, parts={})
    return Responses([sample] * len(values), scores, per_row)


def test_accuracy_avg_at_k_and_pass_at_k_of_three_rows() -> None:
    # rows: 1 of 4, 2 of 4, 0 of 4 samples pass
    sampled = responses([1, 0, 0, 0.5, 1, 1, 0, 0, 0, 0, 0, 0], 4)
    found = Evaluated(responses([1, 0, 0.5], 1), sampled, pass_score=1.0)
    assert found.accuracy == 0.5
    assert found.avg_at_k == pytest.approx(3.5 / 12)
    assert found.pass_at == {
        1: pytest.approx((1 / 4 + 2 / 4) / 3),
        2: pytest.approx((1 / 2 + 5 / 6) / 3),
        4: pytest.approx(2 / 3),
    }
    assert found.metrics() == {
        "validation/accuracy": 0.5,
        "validation/skipped": 0,
        "validation/avg_at_k": found.avg_at_k,
        "validation/pass_at_k": found.pass_at[4],
    }
    assert result_lines(found) == [
        "rows: 3",
        "greedy accuracy: 0.5000",
        "avg@4: 0.2917",
        "pass@1: 0.2500",
        "pass@2: 0.4444",
        "pass@4: 0.6667",
    ]


def test_the_pass_score_decides_what_passes() -> None:
    found = Evaluated(responses([0], 1), responses([0.5, 0, 0.4, 0.4], 2), pass_score=0.5)
    assert found.pass_at == {1: pytest.approx(0.25), 2: pytest.approx(0.5)}


def test_skipped_responses_count_nowhere() -> None:
    found = Evaluated(responses([1, 0, 0], 1, skipped=[2]), responses([1, 0, 1, 1, 0, 0], 2, skipped=[1, 4, 5]), pass_score=1.0)
    assert found.accuracy == 0.5
    assert found.avg_at_k == 1.0
    assert found.pass_at == {1: 1.0, 2: 1.0}  # the first row has one sample left, the third none
    assert found.num_skipped == 4
    assert result_lines(found)[-1] == "skipped responses: 4"


def test_no_row_with_enough_samples_is_no_number() -> None:
    found = Evaluated(responses([1], 1), responses([1, 0], 2, skipped=[1]), pass_score=1.0)
    assert math.isnan(found.pass_at[2])
    assert results(found)["pass_at_k"] == {"1": 1.0, "2": None}


def test_greedy_only_has_no_sampled_figures() -> None:
    found = Evaluated(responses([1, 0], 1), None, pass_score=1.0)
    assert (found.avg_at_k, found.pass_at) == (None, {})
    assert found.metrics().keys() == {"validation/accuracy", "validation/skipped"}
    assert results(found) == {"rows": 2, "skipped": 0, "greedy_accuracy": 0.5}


def test_every_row_is_evaluated_whatever_the_engines_batch(tmp_path: Path) -> None:
    folder = make_sentencepiece(make_llama_folder(tmp_path / "m", tied=True))
    tokenizer = load_tokenizer(folder)
    rows = [
        PromptRow(row_id=i, prompt_ids=(1, 4 + i), prompt="a", answer="b", source="x", position=i + 1, id=str(i))
        for i in range(10)
    ]
    config = Config(rollout=RolloutConfig(engine="hf", max_new_tokens=3), eval=EvalConfig(samples=2))
    found = []
    for max_num_seqs in (4, 128):
        engine = HfEngine(folder, max_model_len=16, max_num_seqs=max_num_seqs)
        deliver(engine, weights(engine))
        with Scorer(RewardConfig()) as scorer:
            found.append(Evaluation(config, rows, tokenizer, scorer).run(engine, step=1))
        engine.close()
    by_four, at_once = (list(each.rows()) for each in found)
    assert [row.row_id for row in by_four] == [*range(10), *(i for i in range(10) for _ in range(2))]
    assert [row.sample_id for row in by_four] == list(range(30))
    assert [row.temperature for row in by_four] == [0.0] * 10 + [1.0] * 20
    assert [row.response_ids for row in by_four] == [row.response_ids for row in at_once]
    assert any(a.response_ids != b.response_ids for a, b in zip(by_four[10::2], by_four[11::2], strict=True))


def weights(engine: HfEngine) -> WeightBuffer:
    """The random weights that the engine started with, as version 0, the same for each engine."""
    torch.manual_seed(3)
    parameters = {name: torch.randn(parameter.shape) for name, parameter in engine._model.named_parameters()}
    buffer = WeightBuffer.create(build_manifest(weight_buffer_meta(parameters)))
    for name, view in buffer.views().items():
        view.copy_(parameters[name])
    buffer.manifest = replace(buffer.manifest, weight_version=0)
    return buffer
