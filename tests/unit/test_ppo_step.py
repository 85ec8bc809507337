"""What does the driver make of a step? `PPO` over workers, engine and scorer that only take notes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from megappo.config.check import Plan
from megappo.config.resolve import resolve
from megappo.config.schema import Config, TrainerConfig
from megappo.config.schema_learning import AlgorithmConfig, ImportanceConfig
from megappo.config.schema_models import ActorConfig, CriticConfig
from megappo.data.prompts import PromptRow
from megappo.errors import RunFailed
from megappo.parallel_state.layout import ParallelLayout
from megappo.rewards.score import Scores
from megappo.rollout.engine import Completion
from megappo.trainer.ppo import PPO
from megappo.trainer.rollout import to_rows
from megappo.trainer.sampling import Sampler

RESPONSES = [(5, 6, 2), (7, 2), (8, 9, 4, 2), (3, 2)]  # of samples 0 to 3
SCORES = (1.0, -50.0, 0.5, 70.0)


class Workers:
    """Log-probs are -id / 10, the reference's -id / 20, and values id / 5; updates are kept."""

    world_size = 1

    def __init__(self, skip: str | None = None) -> None:
        self.updates: dict[str, list[dict[str, Tensor]]] = {"actor": [], "critic": []}
        self.skip = skip

    def call(self, role: str, method: str, /, tensors: dict[str, Tensor] | None = None, **kwargs: Any) -> Any:
        if method == "update":
            assert tensors is not None
            self.updates[role].append(tensors)
            return {}, {"loss": 1.0} if self.skip is None else {"skipped": self.skip}
        if method in ("compute_log_probs", "compute_values"):
            assert tensors is not None
            mask = tensors["response_mask"]
            ids = tensors["input_ids"][:, -mask.shape[1] :] * mask
            log_probs = -ids / (10 if role == "actor" else 20)
            return ({"log_probs": log_probs} if method == "compute_log_probs" else {"values": ids / 5}), {}
        return [{"offload": {}, "publish": {"weights/bytes": 8.0}}.get(method, 1.0)]

    def close(self) -> None: ...


def make_ppo(samples: Sequence[int], skipped: Sequence[int], config: Config, workers: Workers, dp: int = 1) -> PPO:
    """A run on these samples, of which some are skipped (numbers as in RESPONSES)."""
    rows = [PromptRow(i, (i + 10,) * (i + 1), "p", "1", id=f"row {i}") for i in samples]
    answers = [Completion(RESPONSES[i], tuple(-t / 10 for t in RESPONSES[i]), "length" if i < 2 else "stop", 0) for i in samples]
    is_skipped = tuple(i in skipped for i in samples)
    scores = Scores(
        tuple(0.0 if bad else SCORES[i] for i, bad in zip(samples, is_skipped, strict=True)),
        is_skipped,
        is_skipped,
        {"half": tuple(math.nan if bad else SCORES[i] / 2 for i, bad in zip(samples, is_skipped, strict=True))},
    )
    engine: Any = SimpleNamespace(generate=lambda *_: answers, weight_version=1)
    tokenizer: Any = SimpleNamespace(eos_ids=(2,), pad_id=0, decode=lambda ids: " ".join(map(str, ids)))
    prompts: Any = SimpleNamespace(next_batch=lambda n: rows)
    scorer: Any = SimpleNamespace(score=lambda requests, may_skip_all: scores)
    config = resolve(config)
    plan = Plan(config, {}, dict.fromkeys(("actor", "critic", "reference"), ParallelLayout(2, dp=dp)))
    return PPO(plan, workers, engine, Sampler(config, engine, tokenizer, prompts, scorer))


def make_config(num_samples: int, mini_batch_size: int = 2, **sections: Any) -> Config:
    algorithm = sections.pop("algorithm", AlgorithmConfig(kl_coef=0.1))
    return Config(
        actor=ActorConfig(mini_batch_size=mini_batch_size),
        critic=sections.pop("critic", CriticConfig(mini_batch_size=mini_batch_size)),
        algorithm=algorithm,
        trainer=sections.pop("trainer", TrainerConfig(batch_size=num_samples)),
        **sections,
    )


def step(
    samples: Sequence[int], skipped: Sequence[int] = (), mini_batch_size: int = 2, dp: int = 1, **sections: Any
) -> tuple[PPO, dict[str, float], Workers]:
    workers = Workers()
    ppo = make_ppo(samples, skipped, make_config(len(samples), mini_batch_size, **sections), workers, dp)
    return ppo, ppo.step(1), workers


def by_sample(workers: Workers, role: str, column: str) -> dict[int, list[float]]:
    """{first prompt id: the column at the tokens that count} over all updates of a role."""
    found = {}
    for batch in workers.updates[role]:
        for row in range(len(batch["input_ids"])):
            first = int(batch["input_ids"][row][batch["attention_mask"][row]][0])
            found[first] = batch[column][row][batch["response_mask"][row]].tolist() or found.get(
                first, []
            )  # not of a padding row
    return found


def test_the_others_get_what_they_get_without_the_skipped_samples() -> None:
    _, metrics, skipping = step([0, 1, 2, 3], skipped=[1, 3], mini_batch_size=4)
    _, want_metrics, without = step([0, 2], mini_batch_size=2)
    for role, column in (("actor", "advantages"), ("critic", "returns")):
        found = by_sample(skipping, role, column)
        assert (found.pop(11), found.pop(13)) == ([], [])
        want = by_sample(without, role, column)
        assert found.keys() == want.keys() == {10, 12}
        for sample in found:
            assert found[sample] == pytest.approx(want[sample], abs=1e-6)
    for key in want_metrics:
        if key.startswith(("reward/", "advantages/", "critic/", "actor/")) and key not in ("reward/failed", "reward/skipped"):
            assert metrics[key] == pytest.approx(want_metrics[key], rel=1e-6), key


def test_skipped_samples_are_counted_and_their_lengths_too() -> None:
    _, metrics, _ = step([0, 1, 2, 3], skipped=[1, 3])
    assert (metrics["reward/failed"], metrics["reward/skipped"]) == (2, 2)
    assert (metrics["reward/mean"], metrics["reward/min"], metrics["reward/max"]) == (0.75, 0.5, 1.0)
    assert metrics["reward/part/half"] == 0.375
    assert metrics["rollout/response_length_mean"] == (3 + 2 + 4 + 2) / 4
    assert metrics["rollout/prompt_length_mean"] == (1 + 2 + 3 + 4) / 4
    assert metrics["rollout/truncated_fraction"] == 0.5  # by the finish reasons; one response alone is as long as the longest


def test_a_mini_batch_of_skipped_samples_is_no_update() -> None:
    _, _, workers = step([0, 1, 2, 3], skipped=[1, 2, 3], mini_batch_size=1, trainer=TrainerConfig(batch_size=4, max_skips=4))
    for role in ("actor", "critic"):
        (only,) = workers.updates[role]
        assert only["input_ids"][0, -4 - 1] == 10  # sample 0's prompt


def test_rollouts_tell_a_skipped_sample_from_one_that_scored_0() -> None:
    ppo, _, _ = step([0, 1], skipped=[1])
    assert ppo.sampled is not None
    samples, scores = ppo.sampled.samples, ppo.sampled.scores
    kept, skipped = to_rows(samples, scores, ppo.sampled.learnt)
    assert (kept.skipped, kept.reward, kept.reward_parts) == (False, 1.0, {"half": 0.5})
    assert skipped.skipped and math.isnan(skipped.reward) and math.isnan(skipped.reward_parts["half"])
    assert (kept.learnt, skipped.learnt) == (True, False)
    whole = replace(scores, skipped=(False, False), failed=(False, False))
    assert [row.reward for row in to_rows(samples, whole)] == [1.0, 0.0]
    assert [row.learnt for row in to_rows(samples, whole)] == [False, False]  # of a validation


def test_batches_are_cut_evenly_and_come_back_in_their_order() -> None:
    """Over three data-parallel ranks four samples are padded to six, and nothing of that shows in what is learnt."""
    _, metrics, workers = step([0, 1, 2, 3], mini_batch_size=4, dp=3)
    _, want_metrics, want = step([0, 1, 2, 3], mini_batch_size=4)
    (sent,) = workers.updates["actor"]
    assert len(sent["input_ids"]) == 6 and sent["micro_batch"].tolist() == [0, 0] * 3
    assert int(sent["response_mask"].any(dim=1).sum()) == 4
    for role, column in (("actor", "advantages"), ("critic", "returns")):
        found = by_sample(workers, role, column)
        for sample, values in by_sample(want, role, column).items():
            assert found[sample] == pytest.approx(values, abs=1e-6)
    assert metrics["critic/values_mean"] == pytest.approx(want_metrics["critic/values_mean"])
    assert metrics["actor/dp_imbalance"] > want_metrics["actor/dp_imbalance"] == 0


def test_skipped_steps_are_counted_and_too_many_in_a_row_end_the_run() -> None:
    config = make_config(4, 2, trainer=TrainerConfig(batch_size=4, max_skips=3))
    workers = Workers(skip="gradient not finite")
    ppo = make_ppo([0, 1, 2, 3], (), config, workers)
    metrics = ppo.step(1)  # two of each role
    assert (metrics["actor/skipped"], metrics["critic/skipped"]) == (2, 2)
    assert "actor/loss" not in metrics
    workers.skip = None
    assert ppo.step(2)["actor/skipped"] == 0  # the row is over
    workers.skip = "loss not finite"
    ppo.step(3)
    with pytest.raises(RunFailed, match=r"critic: 3 optimizer steps in a row were skipped .*: loss not finite"):
        ppo.step(4)


def test_in_the_critics_warm_up_the_actor_is_not_called() -> None:
    critic = CriticConfig(mini_batch_size=2, warmup_steps=1)
    ppo = make_ppo([0, 1], (), make_config(2, 2, critic=critic), workers := Workers())
    ppo.step(1)
    assert (len(workers.updates["critic"]), len(workers.updates["actor"])) == (1, 0)
    ppo.step(2)
    assert (len(workers.updates["critic"]), len(workers.updates["actor"])) == (2, 1)


def test_without_a_critic_the_actor_alone_learns() -> None:
    _, metrics, workers = step([0, 1, 2], mini_batch_size=3, algorithm=AlgorithmConfig(advantages="reinforce_plus_plus"))
    assert (len(workers.updates["critic"]), len(workers.updates["actor"])) == (0, 1)
    assert not [name for name in metrics if name.startswith("critic/")]


def test_the_actor_gets_the_columns_that_its_loss_needs() -> None:
    algorithm = AlgorithmConfig(kl_loss_coef=0.1, importance=ImportanceConfig(bound="truncated"))
    _, _, workers = step([0, 1], algorithm=algorithm)
    common = {"input_ids", "attention_mask", "response_mask", "sample_ids", "micro_batch"}
    columns = {"old_log_probs", "advantages", "loss_weight", "share"}
    assert workers.updates["actor"][0].keys() == common | columns | {"importance", "ref_log_probs"}
    _, _, workers = step([0, 1], algorithm=AlgorithmConfig())
    assert workers.updates["actor"][0].keys() == common | columns
    assert workers.updates["critic"][0].keys() == common | {"values", "returns"}


def test_the_kl_to_the_reference_is_measured_and_its_coefficient_adapted() -> None:
    ppo, metrics, _ = step([0, 1], algorithm=AlgorithmConfig(kl_coef=0.5, kl_target=0.1))
    kl = sum(-t / 10 + t / 20 for i in (0, 1) for t in RESPONSES[i]) / 5
    assert metrics["actor/ref_kl"] == pytest.approx(kl, rel=1e-5)
    assert (metrics["actor/kl_coef"], ppo.kl_coef) == (0.5, pytest.approx(0.5 * (1 - 0.1 * 0.2)))
    assert ppo.step(2)["actor/kl_coef"] == ppo.kl_coef / (1 - 0.1 * 0.2)
