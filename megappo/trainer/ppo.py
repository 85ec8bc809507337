"""The PPO step, on one page: rollout, reward, log-probs, values, advantages, critic, actor, publish.

The driver runs on rank 0. It calls the workers and does light work itself (advantages, means); models live on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from megappo.algorithms.advantages import gae, place_terminal_reward
from megappo.algorithms.kl import kl_in_reward
from megappo.algorithms.losses import explained_variance
from megappo.algorithms.masking import masked_mean, masked_whiten
from megappo.config.schema import Config, UpdateConfig
from megappo.controller.worker import WorkerGroup
from megappo.data.stream import PromptStream
from megappo.data.tokenizer import Tokenizer
from megappo.errors import RunFailed
from megappo.rewards.score import Scorer, Scores
from megappo.rollout.engine import RolloutEngine
from megappo.trainer.batch import mini_batches
from megappo.trainer.rollout import Sample, generate, sampling_params, score_requests, to_batch

Batch = dict[str, Tensor]
INPUTS = ("input_ids", "attention_mask", "response_mask", "sample_ids")


class PPO:
    """One step at a time: `publish` `first_version` once, then `step` for 1, 2, 3 ... Step s publishes version
    first_version + s."""

    def __init__(
        self,
        config: Config,
        workers: WorkerGroup,
        engine: RolloutEngine,
        tokenizer: Tokenizer,
        prompts: PromptStream,
        scorer: Scorer,
        first_version: int = 0,
    ) -> None:
        self.config, self.workers, self.engine, self.first_version = config, workers, engine, first_version
        self.tokenizer, self.prompts, self.scorer = tokenizer, prompts, scorer
        self.samples: Sequence[Sample] = ()
        self.scores = Scores((), (), (), {})
        self.parameter_norm: float = workers.call("actor", "parameter_norm")[0]

    def step(self, step: int) -> dict[str, float]:
        """One PPO step. Returns its metrics; `samples` and `scores` hold what was sampled."""
        config, algorithm = self.config, self.config.algorithm
        metrics: dict[str, float] = {}
        with timed(metrics, "step"):
            with timed(metrics, "rollout"):
                rows = self.prompts.next_batch(config.trainer.batch_size)
                sampling = sampling_params(config.rollout, self.tokenizer)
                self.samples = generate(
                    self.engine, rows, sampling, self.tokenizer, seed=config.run.seed, step=step, n=config.rollout.n
                )
                batch = to_batch(self.samples, self.tokenizer.pad_id)

            with timed(metrics, "reward"):
                self.scores = self.scorer.score(score_requests(self.samples, step))
                batch["scores"] = torch.tensor(self.scores.values)
                # From here on a skipped sample has no token that counts: not in the losses, advantages, KL or means.
                batch["response_mask"] &= ~torch.tensor(self.scores.skipped).unsqueeze(1)
            mask = batch["response_mask"]

            with timed(metrics, "log_prob"):
                batch["old_log_probs"] = self._score("actor", "compute_log_probs", batch)["log_probs"]
                if config.reference.enabled:
                    batch["ref_log_probs"] = self._score("reference", "compute_log_probs", batch)["log_probs"]
            self._compare_log_probs(batch, metrics)

            with timed(metrics, "values"):
                batch["values"] = self._score("critic", "compute_values", batch)["values"]

            rewards = place_terminal_reward(batch["scores"], mask)
            if config.reference.enabled:
                rewards, kl = kl_in_reward(rewards, batch["old_log_probs"], batch["ref_log_probs"], mask, algorithm.kl_coef)
                metrics["actor/ref_kl"] = masked_mean(kl, mask).item()
            advantages, batch["returns"] = gae(rewards, batch["values"], mask, algorithm.gamma, algorithm.gae_lambda)
            batch["advantages"] = masked_whiten(advantages, mask) if algorithm.whiten_advantages else advantages

            with timed(metrics, "update_critic"):
                metrics |= self._update("critic", config.critic, batch, ("values", "returns"), step)
            with timed(metrics, "update_actor"):
                metrics |= self._update("actor", config.actor, batch, ("old_log_probs", "advantages"), step)
            norm_before, self.parameter_norm = self.parameter_norm, self.workers.call("actor", "parameter_norm")[0]
            metrics["actor/param_norm_delta"] = self.parameter_norm - norm_before
            with timed(metrics, "publish"):
                metrics |= self.publish(self.first_version + step)
            metrics["perf/publish_gb_per_s"] = metrics["weights/bytes"] / 1e9 / metrics["timing_s/publish"]
            metrics |= self.offload()
        return metrics | self._describe(batch, advantages, metrics["timing_s/step"])

    def publish(self, version: int) -> dict[str, float]:
        """Hand the actor's weights to the engine, which holds `version` from then on (trainer/roles.WeightPublisher)."""
        every = self.config.pp_weights.verify_every
        verify = every > 0 and version % every == 0
        found: dict[str, float] = self.workers.call("weights", "publish", version=version, verify=verify)[0]
        return found

    def offload(self) -> dict[str, float]:
        """Take off the ranks' devices what config.offload names; what a call needs of it comes back with the call."""
        ranks: list[dict[str, float]] = self.workers.call("memory", "offload")
        totals = {name: sum(rank[name] for rank in ranks) for name in ranks[0] if name.startswith("memory/")}
        return totals | {name: max(rank[name] for rank in ranks) for name in ranks[0].keys() - totals}

    def _score(self, role: str, method: str, batch: Batch) -> Batch:
        columns: Batch = self.workers.call(role, method, {name: batch[name] for name in INPUTS})[0]
        return columns

    def _update(self, role: str, section: UpdateConfig, batch: Batch, columns: tuple[str, ...], step: int) -> dict[str, float]:
        """Epochs of mini-batches, one optimizer step each, but none on a mini-batch whose samples are all skipped. Returns the
        means of their metrics under the role's name."""
        seen: list[Mapping[str, float]] = []
        seed = self.config.run.seed * 1_000_003 + step
        for mini_batch in mini_batches(batch, section.mini_batch_size, section.epochs, seed, (*INPUTS, *columns)):
            if mini_batch["response_mask"].any():
                seen.append(self.workers.call(role, "update", mini_batch, step=step)[1])
        return {f"{role}/{name}": sum(m[name] for m in seen) / len(seen) for name in seen[0]}

    def _compare_log_probs(self, batch: Batch, metrics: dict[str, float]) -> None:
        """The content check of every hand-over: engine and trainer must give the sampled tokens the same log-probs."""
        rollout = self.config.rollout
        gap = ((batch["rollout_log_probs"] - batch["old_log_probs"]).abs() * batch["response_mask"]).nan_to_num(float("inf"))
        largest = gap.max().item()
        metrics["rollout/logprob_diff_max"] = largest
        metrics["rollout/logprob_diff_mean"] = masked_mean(gap, batch["response_mask"]).item()
        filtered = rollout.top_p < 1 or rollout.top_k > 0  # the engine then renormalises over a part of the vocabulary
        if largest > (rollout.logprob_tolerance or 0.0) and not filtered:
            raise RunFailed(
                f"engine and trainer disagree: their log-probs of a sampled token differ by {largest:.3g}, more than "
                f"rollout.logprob_tolerance={rollout.logprob_tolerance:g}; the engine does not hold the trainer's weights, or "
                f"computes with less precision (then raise the tolerance)"
            )

    def _describe(self, batch: Batch, advantages: Tensor, step_s: float) -> dict[str, float]:
        mask, skipped = batch["response_mask"], torch.tensor(self.scores.skipped)
        scores = batch["scores"][~skipped]
        lengths = torch.tensor([float(len(sample.completion.token_ids)) for sample in self.samples])
        reasons = [sample.completion.finish_reason for sample in self.samples]
        return {
            "reward/mean": scores.mean().item(),
            "reward/std": scores.std(correction=0).item(),
            "reward/min": scores.min().item(),
            "reward/max": scores.max().item(),
            "reward/failed": self.scores.num_failed,
            "reward/skipped": skipped.sum().item(),
            **{f"reward/part/{name}": mean for name, mean in self.scores.part_means().items()},
            "rollout/prompt_length_mean": (batch["attention_mask"].sum(dim=1) - lengths).mean().item(),
            "rollout/response_length_mean": lengths.mean().item(),
            "rollout/response_length_max": lengths.max().item(),
            "rollout/truncated_fraction": reasons.count("length") / len(reasons),
            "advantages/mean": masked_mean(advantages, mask).item(),
            "advantages/std": masked_mean((advantages - masked_mean(advantages, mask)).square(), mask).sqrt().item(),
            "critic/explained_variance": explained_variance(batch["values"], batch["returns"], mask).item(),
            "critic/values_mean": masked_mean(batch["values"], mask).item(),
            "critic/returns_mean": masked_mean(batch["returns"], mask).item(),
            "weights/version": self.engine.weight_version or 0,
            "memory/rank_peak_bytes": max(self.workers.call("process", "peak_memory_bytes")),
            "perf/tokens_per_second": batch["attention_mask"].sum().item() / step_s,
        }


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Seconds of the block, as `timing_s/{name}`."""
    start = time.perf_counter()
    yield
    metrics[f"timing_s/{name}"] = time.perf_counter() - start
