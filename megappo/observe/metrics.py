"""What is measured, and where is it kept? The table of metrics, and `MetricsWriter`: one row a step. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

METRICS: dict[str, str] = {
    "reward/mean": "Mean score of the samples of the step, before any KL penalty. All of reward/ leaves skipped samples out.",
    "reward/std": "Standard deviation of the scores.",
    "reward/min": "Lowest score.",
    "reward/max": "Highest score.",
    "reward/failed": "Samples whose reward failed (with reward.on_error=score or skip_sample).",
    "reward/skipped": "Samples that were left out of the step because their reward failed (with reward.on_error=skip_sample).",
    "rollout/prompt_length_mean": "Mean prompt length in tokens.",
    "rollout/response_length_mean": "Mean response length in tokens, the end token included.",
    "rollout/response_length_max": "Longest response in tokens.",
    "rollout/truncated_fraction": "Fraction of responses that were cut at rollout.max_new_tokens (finish reason `length`).",
    "rollout/logprob_diff_max": "Largest difference between the engine's and the trainer's log-prob of a sampled token.",
    "rollout/logprob_diff_mean": "Mean absolute difference between the engine's and the trainer's log-probs.",
    "rollout/effective_sample_fraction": "Effective sample size of the trainer's over the engine's probabilities, per sample.",
    "rollout/importance_mean": "Mean of those ratios before they are bounded; with algorithm.importance.",
    "rollout/importance_bounded": "Fraction of those ratios that were cut or left out; with algorithm.importance.",
    "rollout/sampling_rounds": "Rounds of sampling that the step took; with algorithm.dynamic_sampling_rounds.",
    "rollout/prompts_without_signal": "Prompts whose responses scored alike, left out; with algorithm.dynamic_sampling_rounds.",
    "advantages/mean": "Mean advantage over valid tokens, before whitening.",
    "advantages/std": "Standard deviation of the advantages over valid tokens, before whitening.",
    "actor/pg_loss": "Policy loss: the mean that algorithm.loss_aggregation says, averaged over the optimizer steps.",
    "actor/kl_loss": "The KL's term of the loss; with algorithm.kl_loss_coef.",
    "actor/loss": "What the actor minimises: the policy loss less the entropy bonus, plus the KL's term.",
    "actor/approx_kl": "KL between the policy that sampled and the updated one (k3 estimate: ratio - 1 - log ratio).",
    "actor/clipfrac": "Fraction of tokens whose loss is the clipped one.",
    "actor/dual_clipfrac": "Fraction of tokens whose loss is bounded by algorithm.dual_clip; where that is set.",
    "actor/ratio": "Mean probability ratio between the updated and the sampling policy.",
    "actor/entropy": "Mean entropy of the policy in nats, at the sampling temperature.",
    "actor/ref_kl": "Mean KL estimate (k1) between policy and reference; where a reference is used.",
    "actor/kl_coef": "algorithm.kl_coef as it stood in this step; with algorithm.kl_target.",
    "actor/skipped": "Optimizer steps of the actor that were skipped on all ranks: not finite, or without a valid token.",
    "actor/padding_share": "Share of the tokens computed in the actor's update that are padding.",
    "actor/dp_imbalance": "Cost (actor.balance) of the actor's fullest data-parallel rank over the mean one, less 1.",
    "actor/micro_batch_imbalance": "Cost of the actor's fullest micro-batch over the mean one, less 1.",
    "actor/grad_norm": "Global gradient norm of the actor before clipping, averaged over the optimizer steps.",
    "actor/lr": "Learning rate of the actor.",
    "actor/param_norm_delta": "Change of the norm of the actor's parameters in this step.",
    "critic/vf_loss": "Value loss: the mean over valid tokens of half the squared error, averaged over the optimizer steps.",
    "critic/loss": "What the critic minimises: the value loss.",
    "critic/vf_clipfrac": "Fraction of tokens whose value moved further than critic.value_clip_range.",
    "critic/explained_variance": "1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant.",
    "critic/values_mean": "Mean value over valid tokens.",
    "critic/returns_mean": "Mean return over valid tokens.",
    "critic/skipped": "Optimizer steps of the critic that were skipped on all ranks.",
    "critic/padding_share": "Share of the tokens computed in the critic's update that are padding.",
    "critic/dp_imbalance": "As actor/dp_imbalance.",
    "critic/micro_batch_imbalance": "As actor/micro_batch_imbalance.",
    "critic/grad_norm": "Global gradient norm of the critic before clipping, averaged over the optimizer steps.",
    "critic/lr": "Learning rate of the critic.",
    "weights/version": "Version of the weights that the engine holds after the step.",
    "weights/bytes": "Bytes of the model that was handed over.",
    "validation/accuracy": "Mean score of greedy responses to the held-out prompts.",
    "validation/avg_at_k": "Mean score of eval.samples sampled responses to each held-out prompt; where eval.samples is set.",
    "validation/pass_at_k": "Chance that one of eval.samples samples scores at least eval.pass_score; where eval.samples is set.",
    "validation/skipped": "Validation responses whose reward failed and that count nowhere (with reward.on_error=skip_sample).",
    "timing_s/rollout": "Seconds of generation.",
    "timing_s/reward": "Seconds of scoring.",
    "timing_s/log_prob": "Seconds of the log-prob passes of actor and reference.",
    "timing_s/values": "Seconds of the value pass.",
    "timing_s/update_critic": "Seconds of the critic's optimizer steps.",
    "timing_s/update_actor": "Seconds of the actor's optimizer steps.",
    "timing_s/publish": "Seconds of handing the weights to the engine.",
    "timing_s/publish_copy": "Seconds of it in which rank 0 copied its own slices into place.",
    "timing_s/publish_exchange": "Seconds of it in which rank 0 exchanged slices with the others, or waited for them.",
    "timing_s/publish_verify": "Seconds of it in which rank 0 summed the bytes; where the version is verified.",
    "timing_s/publish_load": "Seconds of it in which rank 0 waited for the engine.",
    "timing_s/offload": "Seconds of taking the models off their devices, on the slowest rank; where offload is set.",
    "timing_s/onload": "Seconds of bringing them back, on the slowest rank, in the passes that use them; where offload is set.",
    "timing_s/validate": "Seconds of validation; where the step validates.",
    "timing_s/save": "Seconds of writing weights; where the step saves.",
    "timing_s/step": "Seconds of the whole step.",
    "memory/offloaded_bytes": "Bytes that left the devices of all ranks after the step; where offload is set.",
    "memory/to_host_bytes": "Bytes of them that were copied to the host, since they had changed; where offload is set.",
    "memory/to_device_bytes": "Bytes that came back by a copy since the step before; where offload is set.",
    "memory/rank_peak_bytes": "Largest resident memory of any rank so far, in bytes (the engine's process not counted).",
    "perf/publish_gb_per_s": "Bytes of the model (10^9) over the seconds of handing it to the engine.",
    "perf/tokens_per_second": "Prompt and response tokens of the step, over its seconds.",
}
"""Every key of a row in metrics.jsonl besides `step`, with its documentation. docs/metrics.md is made of it."""

NAMED_METRICS: dict[str, str] = {
    "reward/part/NAME": "Mean of a part of the reward, unweighted, over samples whose reward did not fail; with reward.parts.",
}
"""Families of keys, one key for each NAME that the config gives; the rest as METRICS."""

_NOT_DETERMINISTIC = ("timing_s/", "perf/", "memory/", "checkpoint/")


def is_deterministic(key: str) -> bool:
    """Whether two runs of one config must agree on this key: true of all that is no time, speed, size or memory."""
    return not key.startswith(_NOT_DETERMINISTIC)


class MetricsWriter:
    """Appends one row a step to a JSONL file; each row is on disk when `log` returns, so that a killed run loses none."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Write {"step": step, then the metrics by name}. What is not finite is written as null: JSON has no NaN."""
        row: dict[str, Any] = {"step": step, **{key: as_json_number(metrics[key]) for key in sorted(metrics)}}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def as_json_number(value: SupportsFloat) -> int | float | None:
    """An int as it is, any other number (numpy's and torch's included) as a float, and None for what is not finite."""
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
