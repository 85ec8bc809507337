"""How good is the policy on held-out prompts? `Evaluation`: greedy responses to every row, scored by the reward function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megappo.config.schema import Config
from megappo.data.prompts import PromptRow
from megappo.data.tokenizer import Tokenizer
from megappo.rewards.functions import RewardFunction
from megappo.rewards.score import score_all
from megappo.rollout.engine import RolloutEngine
from megappo.trainer.rollout import Sample, generate, sampling_params, score_requests


@dataclass(frozen=True)
class Evaluated:
    """What came of one evaluation. accuracy: mean score of the samples, one for each row."""

    samples: Sequence[Sample]
    scores: Sequence[float]

    @property
    def accuracy(self) -> float:
        return sum(self.scores) / len(self.scores)


class Evaluation:
    """Rows and a reward, kept for the whole run."""

    def __init__(self, config: Config, rows: Sequence[PromptRow], tokenizer: Tokenizer, reward: RewardFunction) -> None:
        self.config, self.rows, self.tokenizer, self.reward = config, rows, tokenizer, reward

    def run(self, engine: RolloutEngine, step: int) -> Evaluated:
        """One greedy response to each row; the engine takes them all at once."""
        sampling = sampling_params(self.config.rollout, self.tokenizer, greedy=True)
        samples = generate(engine, self.rows, sampling, self.tokenizer, seed=self.config.run.seed, step=step)
        scores = score_all(self.reward, score_requests(samples, step), self.config.reward)
        return Evaluated(samples, scores.values)
