"""The PPO step, on one page: rollout, reward, log-probs, values, advantages, critic, actor, publish.

The driver runs on rank 0. It calls the workers and does light work itself (advantages, means); models live on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from megappo.actor.columns import update_columns
from megappo.algorithms.kl import adaptive_kl_coef
from megappo.algorithms.masking import masked_mean
from megappo.algorithms.skip import SkipReason
from megappo.config.check import Plan
from megappo.config.resolve import uses_critic
from megappo.config.schema_models import UpdateConfig
from megappo.controller.worker import WorkerGroup
from megappo.data.proto import DataProto
from megappo.errors import RunFailed
from megappo.observe.timing import timed
from megappo.rollout.engine import RolloutEngine
from megappo.trainer.learning_signal import add_advantages, add_loss_weights, value_metrics
from megappo.trainer.passes import INPUTS, Passes
from megappo.trainer.sampling import Sampled, Sampler, describe_samples

Metrics = dict[str, float]


class PPO:
    """One step at a time: `publish` `first_version` once, then `step` for 1, 2, 3 ... Step s publishes version
    first_version + s."""

    def __init__(self, plan: Plan, workers: WorkerGroup, engine: RolloutEngine, sampler: Sampler, first_version: int = 0) -> None:
        self.config, self.workers, self.engine, self.sampler = plan.config, workers, engine, sampler
        self.first_version = first_version
        self.passes = Passes(plan, workers)
        self.kl_coef = self.config.algorithm.kl_coef
        self.max_skips = self.config.trainer.max_skips
        self.skips_in_a_row = {"actor": 0, "critic": 0}
        self.sampled: Sampled | None = None
        self.parameter_norm: float = workers.call("actor", "parameter_norm")[0]

    def step(self, step: int) -> Metrics:
        """One step. Returns its metrics; `sampled` holds what was sampled."""
        config, algorithm, has_critic = self.config, self.config.algorithm, uses_critic(self.config)
        metrics: Metrics = {}
        with timed(metrics, "step"):
            self.sampled = self.sampler.sample(step, metrics)
            metrics |= describe_samples(self.sampled)
            batch = self.sampled.batch

            with timed(metrics, "log_prob"):
                scored = self.passes.score("actor", "compute_log_probs", batch)
                batch.batch["old_log_probs"] = scored.batch["log_probs"]
                if config.reference.enabled:
                    scored = self.passes.score("reference", "compute_log_probs", batch)
                    batch.batch["ref_log_probs"] = scored.batch["log_probs"]
            self._compare_log_probs(batch, metrics)
            if has_critic:
                with timed(metrics, "values"):
                    batch = batch.union(self.passes.score("critic", "compute_values", batch))

            metrics |= add_advantages(batch, algorithm, self.kl_coef)
            metrics |= add_loss_weights(batch, algorithm)
            if algorithm.kl_target is not None:
                metrics["actor/kl_coef"] = self.kl_coef
                self.kl_coef = adaptive_kl_coef(self.kl_coef, metrics["actor/ref_kl"], algorithm.kl_target, algorithm.kl_gain)

            if has_critic:
                metrics |= value_metrics(batch)
                with timed(metrics, "update_critic"):
                    metrics |= self._update("critic", config.critic, batch, ("values", "returns"), step)
            if step > config.critic.warmup_steps:
                with timed(metrics, "update_actor"):
                    metrics |= self._update("actor", config.actor, batch, update_columns(algorithm), step)
            norm_before, self.parameter_norm = self.parameter_norm, self.workers.call("actor", "parameter_norm")[0]
            metrics["actor/param_norm_delta"] = self.parameter_norm - norm_before
            with timed(metrics, "publish"):
                metrics |= self.publish(self.first_version + step)
            metrics["perf/publish_gb_per_s"] = metrics["weights/bytes"] / 1e9 / metrics["timing_s/publish"]
            metrics |= self.offload()
        return metrics | {
            "weights/version": self.engine.weight_version or 0,
            "memory/rank_peak_bytes": max(self.workers.call("process", "peak_memory_bytes")),
            "perf/tokens_per_second": batch.batch["attention_mask"].sum().item() / metrics["timing_s/step"],
        }

    def publish(self, version: int) -> Metrics:
        """Hand the actor's weights to the engine, which holds `version` from then on (trainer/roles.WeightPublisher)."""
        every = self.config.pp_weights.verify_every
        verify = every > 0 and version % every == 0
        found: Metrics = self.workers.call("weights", "publish", version=version, verify=verify)[0]
        return found

    def offload(self) -> Metrics:
        """Take off the ranks' devices what config.offload names; what a call needs of it comes back with the call."""
        ranks: list[Metrics] = self.workers.call("memory", "offload")
        totals = {name: sum(rank[name] for rank in ranks) for name in ranks[0] if name.startswith("memory/")}
        return totals | {name: max(rank[name] for rank in ranks) for name in ranks[0].keys() - totals}

    def _update(self, role: str, section: UpdateConfig, batch: DataProto, columns: tuple[str, ...], step: int) -> Metrics:
        """Epochs of mini-batches, one optimizer step each. Returns the means of their metrics under the role's name, and how many
        were skipped. Raises RunFailed where too many are, one after the other."""
        seen: list[Mapping[str, float]] = []
        num_skipped = 0
        seed = self.config.run.seed * 1_000_003 + step
        learnt = batch.select((*INPUTS, *columns))  # each mini-batch copies its rows, of these alone
        for mini_batch in learnt.make_iterator(section.mini_batch_size, section.epochs, seed):
            found, reason = self.passes.update(role, mini_batch, columns, step=step)
            if reason is None:
                self.skips_in_a_row[role] = 0
                seen.append(found)
                continue
            num_skipped += 1
            self.skips_in_a_row[role] += 1
            if self.skips_in_a_row[role] >= self.max_skips:
                raise RunFailed(_too_many_skips(role, self.max_skips, reason))
        means = {name: sum(m[name] for m in seen) / len(seen) for name in (seen[0] if seen else ())}
        return {f"{role}/{name}": value for name, value in {**means, "skipped": num_skipped}.items()}

    def _compare_log_probs(self, batch: DataProto, metrics: Metrics) -> None:
        """The content check of every hand-over: engine and trainer must give the sampled tokens the same log-probs."""
        rollout, columns = self.config.rollout, batch.batch
        mask = columns["response_mask"]
        gap = ((columns["rollout_log_probs"] - columns["old_log_probs"]).abs() * mask).nan_to_num(float("inf"))
        largest = gap.max().item()
        metrics["rollout/logprob_diff_max"] = largest
        metrics["rollout/logprob_diff_mean"] = masked_mean(gap, mask).item()
        filtered = rollout.top_p < 1 or rollout.top_k > 0  # the engine then renormalises over a part of the vocabulary
        if largest > (rollout.logprob_tolerance or 0.0) and not filtered:
            raise RunFailed(
                f"engine and trainer disagree: their log-probs of a sampled token differ by {largest:.3g}, more than "
                f"rollout.logprob_tolerance={rollout.logprob_tolerance:g}; the engine does not hold the trainer's weights, or "
                f"computes with less precision (then raise the tolerance)"
            )


def _too_many_skips(role: str, number: int, reason: SkipReason) -> str:
    advice = f"lower {role}.optimizer.lr, or look at the rollouts of this step"
    if reason == "no valid token":
        advice = "rewards fail, or no prompt has responses that score differently: look at the rollouts of this step"
    return (
        f"{role}: {number} optimizer steps in a row were skipped (trainer.max_skips), the last for this: {reason}. Weights and "
        f"optimizer are as before them; {advice}"
    )
