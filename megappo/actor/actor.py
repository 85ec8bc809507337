"""The policy: log-probs of responses, and the policy update. `Actor`; `Policy` is the part that the reference needs, too.

legend: b samples of this data-parallel rank, r response width, n scored tokens
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megappo.actor.columns import update_columns
from megappo.algorithms.losses import cispo_loss, entropy_loss, gspo_loss, kl_loss, ppo_clip_loss
from megappo.config.schema_learning import AlgorithmConfig
from megappo.controller.dispatch import Dispatch, dispatched
from megappo.models.microbatch import MicroBatch
from megappo.models.pipeline_model import Batch, LossSums, PipelineModel, Trainee
from megappo.models.policy_head import PolicyHead


class Policy:
    """A language model that scores responses at the sampling temperature. The reference is one."""

    def __init__(self, model: PipelineModel, temperature: float) -> None:
        self.model = model
        self.head = PolicyHead(model, temperature)

    @dispatched(Dispatch.DP)
    def compute_log_probs(self, batch: Batch, num_micro_batches: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """log_probs and entropy, (b, r) float32, of a padded batch (input_ids, attention_mask, response_mask, micro_batch)."""

        def score(output: Tensor, micro_batch: MicroBatch) -> dict[str, Tensor]:
            log_probs, entropy = self.head.log_probs_and_entropy(output, micro_batch.labels)
            return {"log_probs": log_probs, "entropy": entropy}

        return self.model.score(batch, num_micro_batches, score), {}


class Actor(Policy):
    """The policy that is trained."""

    model: Trainee

    def __init__(self, model: Trainee, temperature: float, algorithm: AlgorithmConfig, entropy_coef: float) -> None:
        super().__init__(model, temperature)
        self.algorithm = algorithm
        self.entropy_coef = entropy_coef

    @dispatched(Dispatch.DP)
    def update(self, mini_batch: Batch, num_micro_batches: int, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """One optimizer step of the policy loss, less the entropy bonus, plus the KL to the reference where it is in the loss.

        mini_batch: input_ids, attention_mask, response_mask, micro_batch (b,); (b, r): old_log_probs, advantages, loss_weight and
        share (`algorithms.aggregation`), importance where log-probs are corrected, ref_log_probs where the loss has a KL.
        Returns global means: pg_loss, kl_loss and loss as the loss is aggregated; of tokens entropy, clipfrac, approx_kl, ratio;
        and what `Trainee.update` does.
        """
        algorithm = self.algorithm
        fields = update_columns(algorithm)

        def loss(output: Tensor, micro_batch: MicroBatch) -> LossSums:
            log_probs, entropy = self.head.log_probs_and_entropy(output, micro_batch.labels)
            given, mask = micro_batch.fields, micro_batch.mask
            weights = given["loss_weight"]
            corrected = weights * given["importance"] if "importance" in given else weights
            pg_loss, sums = self._policy_loss(log_probs, micro_batch, corrected)
            if not self.entropy_coef:
                entropy = entropy.detach()  # only measured: no backward pass through it
            bonus, sums["entropy"] = entropy_loss(entropy, mask, self.entropy_coef, weights)
            total, parts = pg_loss + bonus, {"pg_loss": pg_loss.detach()}
            if "ref_log_probs" in given:
                kl = kl_loss(log_probs, given["ref_log_probs"], mask, algorithm.kl_loss, algorithm.kl_loss_coef, weights)
                total, parts["kl_loss"] = total + kl, kl.detach()
            return LossSums(total, given["share"].sum(), parts, sums)

        return {}, self.model.update(mini_batch, num_micro_batches, fields, loss, step)

    def _policy_loss(self, log_probs: Tensor, micro_batch: MicroBatch, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        algorithm, given, mask = self.algorithm, micro_batch.fields, micro_batch.mask
        common = (log_probs, given["old_log_probs"], given["advantages"], mask)
        low, high = algorithm.clip_range, algorithm.clip_range_high
        if algorithm.policy_loss == "gspo":
            return gspo_loss(*common, micro_batch.rows, low, high, weights)
        if algorithm.policy_loss == "cispo":
            return cispo_loss(*common, low, high, weights)
        return ppo_clip_loss(*common, low, high, algorithm.dual_clip, weights)

    @dispatched(Dispatch.DP)
    def supervised_update(self, mini_batch: Batch, num_micro_batches: int, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """One optimizer step of the next-token loss on the responses (the warm start)."""

        def loss(output: Tensor, micro_batch: MicroBatch) -> LossSums:
            log_probs = self.head.log_probs(output, micro_batch.labels)
            return LossSums(-(log_probs * micro_batch.mask).sum(), micro_batch.mask.sum(), {}, {})

        return {}, self.model.update(mini_batch, num_micro_batches, (), loss, step)

    @dispatched(Dispatch.ALL)
    def parameter_norm(self) -> float:
        return self.model.parameter_norm()
