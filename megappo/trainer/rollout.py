"""How does a step's batch of samples come about? Prompts to responses, each with a seed of its own; `generate`, `to_batch`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megappo.config.schema import RolloutConfig
from megappo.data.prompts import PromptRow
from megappo.data.proto import DataProto
from megappo.data.tokenizer import Tokenizer
from megappo.observe.rollouts import RolloutRow
from megappo.rewards.score import ScoreRequest, Scores
from megappo.rollout.engine import Completion, RolloutEngine, SamplingParams, request_seed
from megappo.trainer.batch import pad_batch, pad_columns


@dataclass(frozen=True)
class Sample:
    """One response to one prompt. The ids are the engine's own, never decoded and encoded again."""

    row: PromptRow
    completion: Completion
    text: str
    temperature: float


def sampling_params(rollout: RolloutConfig, tokenizer: Tokenizer, *, greedy: bool = False) -> SamplingParams:
    """Every parameter, stated; greedy turns temperature, top_p and top_k off."""
    return SamplingParams(
        temperature=0.0 if greedy else rollout.temperature,
        top_p=1.0 if greedy else rollout.top_p,
        top_k=-1 if greedy else rollout.top_k,
        max_new_tokens=rollout.max_new_tokens,
        stop_token_ids=tokenizer.eos_ids,
    )


def generate(
    engine: RolloutEngine,
    rows: Sequence[PromptRow],
    sampling: SamplingParams,
    tokenizer: Tokenizer,
    *,
    seed: int,
    step: int,
    n: int = 1,
    seen: Counter[int] | None = None,
) -> list[Sample]:
    """`n` responses a row, in the rows' order. A sample depends on (seed, step, row, its number among the row's) alone.

    seen: responses that each row has got in this step by earlier calls; brought up to date."""
    repeated = [row for row in rows for _ in range(n)]
    seen = Counter() if seen is None else seen
    seeds = []
    for row in repeated:
        seeds.append(request_seed(seed, step, row.row_id, seen[row.row_id]))
        seen[row.row_id] += 1
    completions = engine.generate([row.prompt_ids for row in repeated], sampling, seeds)
    texts = [tokenizer.decode(completion.token_ids) for completion in completions]
    return [
        Sample(row, completion, text, sampling.temperature)
        for row, completion, text in zip(repeated, completions, texts, strict=True)
    ]


def score_requests(samples: Sequence[Sample], step: int, first: int = 0, what: str = "sample") -> list[ScoreRequest]:
    """What the reward function gets for each sample. first: number of the first sample in the step."""
    return [
        ScoreRequest(f"step {step} {what} {i} (row {s.row.id})", s.row.prompt_text, s.text, s.row.answer, s.row.fields)
        for i, s in enumerate(samples, first)
    ]


def to_batch(samples: Sequence[Sample], pad_id: int) -> DataProto:
    """Padded batch of the samples with `rollout_log_probs` (b, r), the engine's log-probs."""
    batch = pad_batch([s.row.prompt_ids for s in samples], [s.completion.token_ids for s in samples], pad_id)
    width = batch.batch["response_mask"].shape[1]
    batch.batch["rollout_log_probs"] = pad_columns([s.completion.log_probs for s in samples], width)
    return batch


def to_rows(samples: Sequence[Sample], scores: Scores, learnt: Collection[int] = ()) -> list[RolloutRow]:
    """What is written of the samples. learnt: numbers of those that a step learns from."""
    return [
        RolloutRow(
            sample_id=i,
            row_id=s.row.row_id,
            id=s.row.id,
            source=s.row.source,
            position=s.row.position,
            prompt_ids=s.row.prompt_ids,
            response_ids=s.completion.token_ids,
            logprobs=s.completion.log_probs,
            weight_version=s.completion.weight_version,
            finish_reason=s.completion.finish_reason,
            reward=math.nan if scores.skipped[i] else scores.values[i],
            reward_parts={name: values[i] for name, values in scores.parts.items()},
            skipped=scores.skipped[i],
            learnt=i in learnt,
            temperature=s.temperature,
            prompt=s.row.prompt_text,
            response=s.text,
            answer=s.row.answer,
        )
        for i, s in enumerate(samples)
    ]
