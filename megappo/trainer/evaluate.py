"""How good is the policy on held-out prompts? `Evaluation`: a greedy and `eval.samples` sampled responses to every row, scored.

Training validates with it, the warm start and `megappo eval` measure with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megappo.algorithms.pass_at_k import ks_up_to, pass_at_k
from megappo.config.schema import Config
from megappo.data.prompts import PromptRow
from megappo.data.tokenizer import Tokenizer
from megappo.observe.rollouts import RolloutRow
from megappo.rewards.score import Scorer, Scores
from megappo.rollout.engine import RolloutEngine, SamplingParams, request_seed
from megappo.trainer.rollout import Sample, generate, sampling_params, score_requests, to_rows


@dataclass(frozen=True)
class Responses:
    """`per_row` responses to each row, in the rows' order, and their scores."""

    samples: Sequence[Sample]
    scores: Scores
    per_row: int

    def rows(self) -> list[RolloutRow]:
        """What is written of them."""
        return to_rows(self.samples, self.scores)


@dataclass(frozen=True)
class Evaluated:
    """What came of one evaluation. sampled: None with eval.samples=0. A response whose reward failed and was skipped counts
    nowhere; a row with fewer than k others is left out of pass@k."""

    greedy: Responses
    sampled: Responses | None
    pass_score: float

    @property
    def accuracy(self) -> float:
        """Mean score of the greedy responses."""
        return self.greedy.scores.mean()

    @cached_property
    def avg_at_k(self) -> float | None:
        """Mean score of the sampled responses."""
        return self.sampled.scores.mean() if self.sampled else None

    @cached_property
    def pass_at(self) -> dict[int, float]:
        """{k: chance that one of k samples scores at least `pass_score`}, mean over the rows; k = 1, 2, 4, ... eval.samples."""
        if self.sampled is None:
            return {}
        n, scores = self.sampled.per_row, self.sampled.scores
        tried_passed = []
        for start in range(0, len(scores.values), n):
            kept = [scores.values[i] for i in range(start, start + n) if not scores.skipped[i]]
            tried_passed.append((len(kept), sum(value >= self.pass_score for value in kept)))
        return {k: _mean([pass_at_k(tried, passed, k) for tried, passed in tried_passed if tried >= k]) for k in ks_up_to(n)}

    @property
    def num_skipped(self) -> int:
        return sum(sum(responses.scores.skipped) for responses in (self.greedy, self.sampled) if responses)

    def metrics(self) -> dict[str, float]:
        """Under the names of metrics.jsonl."""
        metrics = {"validation/accuracy": self.accuracy, "validation/skipped": self.num_skipped}
        if self.sampled and self.avg_at_k is not None:
            metrics |= {"validation/avg_at_k": self.avg_at_k, "validation/pass_at_k": self.pass_at[self.sampled.per_row]}
        return metrics

    def rows(self) -> list[RolloutRow]:
        """Greedy responses, then sampled ones, numbered through."""
        rows = self.greedy.rows() + (self.sampled.rows() if self.sampled else [])
        return [replace(row, sample_id=i) for i, row in enumerate(rows)]


class Evaluation:
    """Rows and their reward, kept for the whole run."""

    def __init__(self, config: Config, rows: Sequence[PromptRow], tokenizer: Tokenizer, scorer: Scorer) -> None:
        self.config, self.rows, self.tokenizer, self.scorer = config, rows, tokenizer, scorer
        rollout, own = config.rollout, config.eval
        self._greedy = sampling_params(rollout, tokenizer, greedy=True)
        self._sampled = replace(self._greedy, temperature=own.temperature, top_p=own.top_p, top_k=own.top_k)

    def run(self, engine: RolloutEngine, step: int, *, greedy_only: bool = False) -> Evaluated:
        """Every row, with the weights that the engine holds. The engine takes all prompts at once and fills its own batches, so
        none is left over. step: names the samples in messages and seeds them."""
        samples = 0 if greedy_only else self.config.eval.samples
        return Evaluated(
            greedy=self._responses(engine, step, self._greedy, 1),
            sampled=self._responses(engine, step, self._sampled, samples) if samples else None,
            pass_score=self.config.eval.pass_score,
        )

    def _responses(self, engine: RolloutEngine, step: int, sampling: SamplingParams, per_row: int) -> Responses:
        seed = request_seed(self.config.run.seed, step, "evaluation", 0)  # other samples than the training step's
        samples = generate(engine, self.rows, sampling, self.tokenizer, seed=seed, step=step, n=per_row)
        return Responses(samples, self.scorer.score(score_requests(samples, step)), per_row)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
