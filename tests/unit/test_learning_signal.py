"""Do a batch's advantages and loss weights follow the config? Against float64 loops and literal numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megappo.config.resolve import resolve
from megappo.config.schema import Config
from megappo.config.schema_learning import AlgorithmConfig, ImportanceConfig, RewardConfig
from megappo.data.proto import DataProto
from megappo.trainer.learning_signal import add_advantages, add_loss_weights, less_overlong

LENGTHS = [3, 1, 2, 4]
SCORES = [1.0, 0.0, 2.0, -1.0]


def batch() -> DataProto:
    generator = torch.Generator().manual_seed(2)
    mask = torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    columns = {name: -torch.rand(4, 5, generator=generator) for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs")}
    columns["values"] = torch.randn(4, 5, generator=generator)
    for column in columns.values():
        column[~mask] = torch.nan  # what stands there never matters
    return DataProto.from_dict(
        {
            **columns,
            "response_mask": mask,
            "learnt_scores": torch.tensor(SCORES),
            "group_ids": torch.tensor([0, 0, 1, 1]),
            "greedy_scores": torch.tensor([0.5, 0.5, 1.0, 1.0]),
        }
    )


def algorithm(**options: Any) -> AlgorithmConfig:
    return resolve(Config(algorithm=AlgorithmConfig(**options))).algorithm


def token_rewards(data: DataProto, kl_coef: float) -> list[list[float]]:
    """Score at the last token, less the KL penalty at each."""
    old, ref = data.batch["old_log_probs"].double(), data.batch["ref_log_probs"].double()
    rewards = [[-kl_coef * float(old[i, t] - ref[i, t]) for t in range(n)] for i, n in enumerate(LENGTHS)]
    for row, score in zip(rewards, SCORES, strict=True):
        row[-1] += score
    return rewards


def by_hand(data: DataProto, kind: str, kl_coef: float, gamma: float) -> list[list[float]]:
    rewards = token_rewards(data, kl_coef)
    totals = [sum(row) for row in rewards]
    others = [totals[1], totals[0], totals[3], totals[2]]
    if kind in ("grpo", "rloo", "reinforce_plus_plus_baseline"):
        means = [(a + b) / 2 for a, b in zip(totals, others, strict=True)]
        deviation = [abs(a - b) / math.sqrt(2) for a, b in zip(totals, others, strict=True)]
        one = {
            "grpo": [(t - m) / (d + 1e-6) for t, m, d in zip(totals, means, deviation, strict=True)],
            "rloo": [t - o for t, o in zip(totals, others, strict=True)],
            "reinforce_plus_plus_baseline": [t - m for t, m in zip(totals, means, strict=True)],
        }[kind]
        return [[value] * n for value, n in zip(one, LENGTHS, strict=True)]
    baseline = data.batch["greedy_scores"].tolist() if kind == "remax" else [0.0] * 4
    decay = 1.0 if kind == "remax" else gamma
    return [
        [sum(decay ** (k - t) * row[k] for k in range(t, len(row))) - base for t in range(len(row))]
        for row, base in zip(rewards, baseline, strict=True)
    ]


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"])
@pytest.mark.parametrize("whiten", [True, False])
def test_advantages_without_a_critic(kind: str, whiten: bool) -> None:
    data = batch()
    metrics = add_advantages(data, algorithm(advantages=kind, gamma=0.9, whiten_advantages=whiten), kl_coef=0.3)
    flat = torch.tensor([value for row in by_hand(data, kind, 0.3, 0.9) for value in row], dtype=torch.float64)
    assert metrics["advantages/mean"] == pytest.approx(flat.mean().item(), abs=1e-6)
    assert metrics["advantages/std"] == pytest.approx(flat.std(correction=0).item(), rel=1e-5)
    want = (flat - flat.mean()) / flat.std() if whiten else flat
    mask = data.batch["response_mask"]
    torch.testing.assert_close(data.batch["advantages"][mask].double(), want, atol=1e-5, rtol=1e-5)
    assert data.batch["advantages"][~mask].abs().max() == 0
    assert "returns" not in data.batch
    old, ref = data.batch["old_log_probs"][mask], data.batch["ref_log_probs"][mask]
    assert metrics["actor/ref_kl"] == pytest.approx((old - ref).mean().item(), abs=1e-6)


def test_whitening_is_over_tokens_not_samples_and_only_those_that_count() -> None:
    nan, yes, no = math.nan, True, False
    columns = {"old_log_probs": torch.zeros(2, 3)}
    plus_plus = DataProto.from_dict(
        {
            **columns,
            "response_mask": torch.tensor([[yes, no, yes], [yes, yes, no]]),  # a tool span in the middle
            "ref_log_probs": torch.tensor([[0.5, nan, 0.0], [0.0, 0.0, nan]]),
            "learnt_scores": torch.tensor([1.0, 2.0]),
            "group_ids": torch.tensor([0, 1]),
        }
    )
    add_advantages(plus_plus, algorithm(advantages="reinforce_plus_plus", gamma=0.5), kl_coef=1.0)
    # .5 + 1 / 2 and 1; 2 / 2 and 2: mean 1.25, squares .0625 * 3 + .5625 = .75, over 3: variance .25
    torch.testing.assert_close(plus_plus.batch["advantages"], torch.tensor([[-0.5, 0.0, -0.5], [-0.5, 1.5, 0.0]]))
    baseline = DataProto.from_dict(
        {
            **columns,
            "response_mask": torch.tensor([[yes, yes, yes], [yes, no, no]]),
            "learnt_scores": torch.tensor([1.0, 0.0]),
            "group_ids": torch.tensor([0, 0]),
        }
    )
    add_advantages(baseline, algorithm(advantages="reinforce_plus_plus_baseline"), kl_coef=0.0)
    # three tokens of .5, one of -.5: mean .25, variance (3 * .0625 + .5625) / 3 = .25
    torch.testing.assert_close(baseline.batch["advantages"], torch.tensor([[0.5, 0.5, 0.5], [-1.5, 0.0, 0.0]]))


def test_grpo_without_the_deviation() -> None:
    data = batch()
    add_advantages(data, algorithm(advantages="grpo", normalize_by_std=False, kl_coef=0.3), kl_coef=0.3)
    mask = data.batch["response_mask"]
    want = torch.tensor([v for row in by_hand(data, "reinforce_plus_plus_baseline", 0.3, 1.0) for v in row])  # not whitened
    torch.testing.assert_close(data.batch["advantages"][mask], want, atol=1e-5, rtol=1e-5)


def test_gae_has_the_returns_that_the_critic_learns() -> None:
    data = batch()
    add_advantages(data, algorithm(gamma=0.9, gae_lambda=0.8, whiten_advantages=False), kl_coef=0.3)
    values, rewards = data.batch["values"].double(), token_rewards(data, 0.3)
    for i, n in enumerate(LENGTHS):
        advantage = 0.0
        for t in reversed(range(n)):
            after = float(values[i, t + 1]) if t + 1 < n else 0.0
            advantage = rewards[i][t] + 0.9 * after - float(values[i, t]) + 0.9 * 0.8 * advantage
            assert data.batch["advantages"][i, t].item() == pytest.approx(advantage, abs=1e-5)
            assert data.batch["returns"][i, t].item() == pytest.approx(advantage + float(values[i, t]), abs=1e-5)


def test_which_advantages_are_whitened_where_nobody_says() -> None:
    kinds = ("gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax")
    whitened = [kind for kind in kinds if algorithm(advantages=kind).whiten_advantages]
    assert whitened == ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]


def test_loss_weights_are_those_of_the_aggregation() -> None:
    data = batch()
    add_loss_weights(data, algorithm(policy_loss="gspo"))
    assert data.batch["loss_weight"][0].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0])
    assert data.batch["share"].sum().item() == 4
    assert "importance" not in data.batch
    add_loss_weights(data, algorithm(loss_aggregation="constant_length", loss_length=7))
    assert (data.batch["loss_weight"].sum().item(), data.batch["share"].sum().item()) == (10, 28)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bound", ["truncated", "masked"])
def test_the_gap_between_engine_and_trainer(level: str, bound: str) -> None:
    data = batch()
    correction = ImportanceConfig(bound=bound, level=level, cap=1.2, floor=0.7 if bound == "masked" else 0.0)  # type: ignore[arg-type]
    metrics = add_loss_weights(data, algorithm(importance=correction))
    mask = data.batch["response_mask"]
    gaps = [(data.batch["old_log_probs"][i, :n] - data.batch["rollout_log_probs"][i, :n]).double() for i, n in enumerate(LENGTHS)]
    ratios = [gap.sum().exp().repeat(len(gap)) if level == "sequence" else gap.exp() for gap in gaps]
    each = torch.stack([ratio[0] for ratio in ratios]) if level == "sequence" else torch.cat(ratios)
    flat = torch.cat(ratios)

    def bounded(ratio: torch.Tensor) -> torch.Tensor:
        return ratio.clamp(max=1.2) if bound == "truncated" else ratio * ((ratio >= 0.7) & (ratio <= 1.2))

    torch.testing.assert_close(data.batch["importance"][mask].double(), bounded(flat), atol=1e-6, rtol=1e-6)
    assert metrics["rollout/importance_mean"] == pytest.approx(each.mean().item())
    outside = (each > 1.2) | ((each < 0.7) & (bound == "masked"))
    assert metrics["rollout/importance_bounded"] == pytest.approx(outside.double().mean().item())
    weights = bounded(each)
    fraction = weights.sum() ** 2 / (len(weights) * weights.square().sum())
    assert metrics["rollout/effective_sample_fraction"] == pytest.approx(fraction.item())


def test_without_a_correction_the_effective_sample_size_is_still_measured() -> None:
    data = batch()
    metrics = add_loss_weights(data, algorithm())
    mask = data.batch["response_mask"]
    ratios = (data.batch["old_log_probs"] - data.batch["rollout_log_probs"])[mask].double().exp()
    want = ratios.sum() ** 2 / (len(ratios) * ratios.square().sum())
    assert metrics == {"rollout/effective_sample_fraction": pytest.approx(want.item())}


def test_the_overlong_buffer() -> None:
    scores, lengths = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([4, 6, 8])
    reward = RewardConfig(overlong_buffer=4, overlong_penalty=0.5)
    assert less_overlong(scores, lengths, reward, 8).tolist() == [1.0, 0.75, 0.5]
    assert less_overlong(scores, lengths, RewardConfig(), 8).tolist() == [1.0, 1.0, 1.0]
