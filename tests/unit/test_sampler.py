"""Which samples does a step get, and with which scores? `Sampler` over an engine and a scorer that are scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from megappo.config.resolve import resolve
from megappo.config.schema import Config, RolloutConfig, TrainerConfig
from megappo.config.schema_learning import AlgorithmConfig, RewardConfig
from megappo.data.prompts import PromptRow
from megappo.rewards.score import Scores
from megappo.rollout.engine import Completion, SamplingParams
from megappo.trainer.sampling import Sampler, describe_samples


@dataclass
class Script:
    """An engine and a scorer: scores come from `scores` in order; "x" is a reward that fails."""

    scores: list[float | str]
    length: int = 2
    seeds: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    prompts: int = 0

    weight_version = 0

    def generate(self, prompts: Sequence[Any], sampling: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        self.seeds += seeds
        self.temperatures += [sampling.temperature] * len(prompts)
        return [Completion((5,) * self.length, (-1.0,) * self.length, "stop", 0) for _ in prompts]

    def score(self, requests: Sequence[Any], may_skip_all: bool) -> Scores:
        drawn = [self.scores.pop(0) for _ in requests]
        bad = tuple(value == "x" for value in drawn)
        assert may_skip_all or not all(bad), "the scorer would end the run"
        return Scores(tuple(0.0 if value == "x" else float(value) for value in drawn), bad, bad, {})

    def next_batch(self, number: int) -> list[PromptRow]:
        rows = [PromptRow(i % 3, (1, 2), "p", "1", id=str(i % 3)) for i in range(self.prompts, self.prompts + number)]
        self.prompts += number
        return rows


def sampler(script: Script, batch_size: int, n: int, algorithm: dict[str, Any] | None = None, **reward: Any) -> Sampler:
    config = resolve(
        Config(
            rollout=RolloutConfig(n=n, max_new_tokens=8),
            trainer=TrainerConfig(batch_size=batch_size),
            algorithm=AlgorithmConfig(**(algorithm or {})),
            reward=RewardConfig(**reward),
        )
    )
    tokenizer: Any = SimpleNamespace(eos_ids=(2,), pad_id=0, decode=str)
    return Sampler(config, script, tokenizer, script, script)  # type: ignore[arg-type]


def test_prompts_without_a_signal_are_replaced_until_the_batch_is_full() -> None:
    script = Script([1, 1, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1])  # of three prompts one, of two one, and the last
    metrics: dict[str, float] = {}
    sampled = sampler(script, 3, 2, {"dynamic_sampling_rounds": 5}).sample(1, metrics)
    assert (script.prompts, script.scores) == (6, [])
    assert (metrics["rollout/sampling_rounds"], metrics["rollout/prompts_without_signal"]) == (3, 3)
    assert sampled.batch.batch["learnt_scores"].tolist() == [0, 1, 1, 0, 0, 1]
    assert sampled.learnt == {2, 3, 8, 9, 10, 11}
    assert describe_samples(sampled)["reward/mean"] == pytest.approx(5 / 12)  # of all that were drawn


def test_rounds_are_bounded_and_a_short_batch_is_trained_on() -> None:
    metrics: dict[str, float] = {}
    sampled = sampler(Script([1, 1, 0, 1, 1, 1]), 2, 2, {"dynamic_sampling_rounds": 2}).sample(1, metrics)
    assert metrics["rollout/sampling_rounds"] == 2
    assert len(sampled.batch) == 2 and sampled.batch.batch["response_mask"].all()
    assert sampled.batch.batch["group_ids"].tolist() == [0, 0]


def test_a_step_in_which_nothing_teaches_has_no_token_that_counts() -> None:
    sampled = sampler(Script([1, 1, 0, 0]), 2, 2, {"dynamic_sampling_rounds": 1}).sample(1, {})
    assert len(sampled.batch) == 4 and not sampled.batch.batch["response_mask"].any()
    assert sampled.learnt == set()


def test_a_row_that_comes_again_in_a_later_round_draws_other_samples() -> None:
    script = Script([0, 0] * 3 + [1, 0] * 3)  # rows 0, 1, 2, then 0, 1, 2 again
    sampler(script, 3, 2, {"dynamic_sampling_rounds": 2}).sample(1, {})
    assert len(set(script.seeds)) == 12


def test_a_failed_reward_goes_with_its_sample_and_a_group_needs_two_that_count() -> None:
    script = Script([1, "x", 0, 1])
    sampled = sampler(script, 2, 2, {"dynamic_sampling_rounds": 1}).sample(1, {})
    assert sampled.learnt == {2, 3}
    sampled = sampler(Script([1, "x", 0, 1]), 2, 2).sample(1, {})
    assert sampled.learnt == {0, 2, 3}
    assert sampled.batch.batch["response_mask"].any(dim=1).tolist() == [True, False, True, True]


def test_a_later_round_may_lose_all_of_its_few_samples() -> None:
    sampled = sampler(Script([0, 0, 1, 0, "x", "x"]), 2, 2, {"dynamic_sampling_rounds": 2}).sample(1, {})
    assert sampled.learnt == {2, 3}


def test_remax_takes_the_score_of_the_greedy_response_and_leaves_prompts_without_one_out() -> None:
    script = Script([1, 0, 0.5, 0.25, 0.75, "x"])
    sampled = sampler(script, 2, 2, {"advantages": "remax"}, scale=2.0).sample(1, {})
    assert script.temperatures == [1.0] * 4 + [0.0] * 2
    assert sampled.batch.batch["learnt_scores"].tolist() == [2.0, 0.0, 1.0, 0.5]
    assert sampled.learnt == {0, 1}
    assert sampled.batch.batch["greedy_scores"].tolist() == [1.5, 1.5, 0.0, 0.0]
    assert sampled.batch.batch["response_mask"].any(dim=1).tolist() == [True, True, False, False]


def test_scores_are_shaped_and_metrics_show_them_as_they_were() -> None:
    """Of 8 tokens at most, 4 of buffer: 6 tokens lose half of the penalty."""
    script = Script([1, 0], length=6)
    sampled = sampler(script, 2, 1, overlong_buffer=4, overlong_penalty=3.0, scale=2.0, clip=2.5).sample(1, {})
    assert sampled.batch.batch["learnt_scores"].tolist() == [-1.0, -2.5]
    assert describe_samples(sampled)["reward/mean"] == 0.5


def test_scores_are_divided_by_the_deviation_of_the_run_so_far() -> None:
    script = Script([0, 4, 8, "x"])
    running = sampler(script, 2, 1, divide_by_std=True)
    assert running.sample(1, {}).batch.batch["learnt_scores"].tolist() == pytest.approx([0, 4 / 8**0.5])
    assert running.sample(2, {}).batch.batch["learnt_scores"].tolist()[0] == pytest.approx(8 / 4)  # of 0, 4, 8: 4
