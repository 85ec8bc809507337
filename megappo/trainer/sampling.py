"""Which samples does a step learn from? `Sampler`: responses and scores, sampled on until enough prompts teach anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megappo.algorithms.dynamic_sampling import Refill, rows_with_signal
from megappo.algorithms.reward_shaping import RunningMoments, shape_scores
from megappo.config.schema import Config
from megappo.data.prompts import PromptRow
from megappo.data.proto import DataProto
from megappo.data.stream import PromptStream
from megappo.data.tokenizer import Tokenizer
from megappo.observe.timing import timed
from megappo.rewards.score import Scorer, Scores
from megappo.rollout.engine import RolloutEngine
from megappo.trainer.learning_signal import less_overlong
from megappo.trainer.rollout import Sample, generate, sampling_params, score_requests, to_batch


@dataclass(frozen=True)
class Sampled:
    """All samples of a step, and which of them it learns from."""

    samples: Sequence[Sample]
    scores: Scores
    learnt: frozenset[int]
    """numbers of the samples that count"""
    batch: DataProto
    """input_ids, attention_mask, response_mask, sample_ids, rollout_log_probs, learnt_scores, group_ids; greedy_scores for
    `remax`. A sample that does not count has no token in response_mask."""


class Sampler:
    """Draws the samples of one step after the other."""

    def __init__(
        self, config: Config, engine: RolloutEngine, tokenizer: Tokenizer, prompts: PromptStream, scorer: Scorer
    ) -> None:
        self.config, self.engine, self.tokenizer, self.prompts, self.scorer = config, engine, tokenizer, prompts, scorer
        self.moments = RunningMoments()

    def sample(self, step: int, metrics: dict[str, float]) -> Sampled:
        """The samples of a step. Adds its timings, and what dynamic sampling did, to the metrics."""
        config, n = self.config, self.config.rollout.n
        rounds = config.algorithm.dynamic_sampling_rounds
        refill = Refill(config.trainer.batch_size, max(rounds, 1))
        samples: list[Sample] = []
        scores = Scores((), (), (), {})
        seen: Counter[int] = Counter()
        while refill.needs_more:
            rows = self.prompts.next_batch(refill.missing)
            with timed(metrics, "rollout"):
                drawn = self._generate(rows, step, n, seen)
            with timed(metrics, "reward"):
                # of the few prompts of a later round all may fail, of the whole step not
                found = self.scorer.score(score_requests(drawn, step, first=len(samples)), may_skip_all=bool(samples))
            samples += drawn
            scores = scores.joined(found)
            refill = refill.after_round(_has_signal(found, n) if rounds else [True] * len(rows))
        if rounds:
            metrics["rollout/sampling_rounds"] = refill.rounds
            metrics["rollout/prompts_without_signal"] = refill.dropped
        # Where no prompt teaches anything the first ones stand in, without a token that counts: the step is then skipped.
        groups = refill.kept or range(config.trainer.batch_size)
        chosen = [group * n + i for group in groups for i in range(n)]
        batch = to_batch([samples[i] for i in chosen], self.tokenizer.pad_id)
        counts = torch.tensor([bool(refill.kept) and not scores.skipped[i] for i in chosen])
        batch.batch["response_mask"] &= counts.unsqueeze(1)
        batch.batch["group_ids"] = torch.arange(len(groups)).repeat_interleave(n)
        self._add_scores(batch, [samples[i] for i in chosen], [scores.values[i] for i in chosen], counts)
        if config.algorithm.advantages == "remax":
            self._add_greedy_scores(batch, [samples[i].row for i in chosen[::n]], step, metrics)
        counting = batch.batch["response_mask"].any(dim=1).tolist()
        learnt = frozenset(i for i, counts_still in zip(chosen, counting, strict=True) if counts_still)
        return Sampled(samples, scores, learnt, batch)

    def _add_scores(self, batch: DataProto, samples: Sequence[Sample], values: Sequence[float], counts: torch.Tensor) -> None:
        scores = self._less_overlong(samples, values)
        self.moments = self.moments.with_scores(scores, counts)
        batch.batch["learnt_scores"] = self._shaped(scores)

    def _add_greedy_scores(self, batch: DataProto, rows: Sequence[PromptRow], step: int, metrics: dict[str, float]) -> None:
        """The baseline of ReMax. A prompt whose greedy response has no score has none, and teaches nothing."""
        with timed(metrics, "rollout"):
            greedy = sampling_params(self.config.rollout, self.tokenizer, greedy=True)
            samples = generate(self.engine, rows, greedy, self.tokenizer, seed=self.config.run.seed, step=step)
        with timed(metrics, "reward"):
            scores = self.scorer.score(score_requests(samples, step, what="greedy sample"), may_skip_all=True)
        n = self.config.rollout.n
        shaped = self._shaped(self._less_overlong(samples, scores.values))
        batch.batch["greedy_scores"] = shaped.repeat_interleave(n)
        batch.batch["response_mask"] &= ~torch.tensor(scores.skipped).repeat_interleave(n).unsqueeze(1)

    def _generate(self, rows: Sequence[PromptRow], step: int, n: int, seen: Counter[int]) -> list[Sample]:
        sampling = sampling_params(self.config.rollout, self.tokenizer)
        return generate(self.engine, rows, sampling, self.tokenizer, seed=self.config.run.seed, step=step, n=n, seen=seen)

    def _less_overlong(self, samples: Sequence[Sample], values: Sequence[float]) -> torch.Tensor:
        lengths = torch.tensor([len(sample.completion.token_ids) for sample in samples])
        return less_overlong(torch.tensor(values), lengths, self.config.reward, self.config.rollout.max_new_tokens)

    def _shaped(self, scores: torch.Tensor) -> torch.Tensor:
        reward = self.config.reward
        return shape_scores(scores, reward.scale, reward.clip, self.moments if reward.divide_by_std else None)


def _has_signal(scores: Scores, n: int) -> list[bool]:
    """Of each prompt of a round: whether its responses that count score differently."""
    values = torch.tensor(scores.values)
    groups = torch.arange(len(values) // n).repeat_interleave(n)
    return rows_with_signal(values, groups, ~torch.tensor(scores.skipped).unsqueeze(1))[::n].tolist()


def describe_samples(sampled: Sampled) -> dict[str, float]:
    """Metrics of all samples of a step."""
    samples, scores = sampled.samples, sampled.scores
    counted = torch.tensor([value for value, skipped in zip(scores.values, scores.skipped, strict=True) if not skipped])
    lengths = torch.tensor([float(len(sample.completion.token_ids)) for sample in samples])
    prompts = torch.tensor([float(len(sample.row.prompt_ids)) for sample in samples])
    reasons = [sample.completion.finish_reason for sample in samples]
    return {
        "reward/mean": counted.mean().item(),
        "reward/std": counted.std(correction=0).item(),
        "reward/min": counted.min().item(),
        "reward/max": counted.max().item(),
        "reward/failed": scores.num_failed,
        "reward/skipped": sum(scores.skipped),
        **{f"reward/part/{name}": mean for name, mean in scores.part_means().items()},
        "rollout/prompt_length_mean": prompts.mean().item(),
        "rollout/response_length_mean": lengths.mean().item(),
        "rollout/response_length_max": lengths.max().item(),
        "rollout/truncated_fraction": reasons.count("length") / len(reasons),
    }
