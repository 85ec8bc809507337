"""The policy: log-probs of responses, and the PPO update. `Actor`; `Policy` is the part that the reference needs, too.

legend: b samples of this data-parallel rank, r response width, n scored tokens
"""

from __future__ import annotations

from torch import Tensor

from megappo.algorithms.losses import ppo_clip_loss
from megappo.controller.dispatch import Dispatch, dispatched
from megappo.models.heads import vocab_parallel_log_probs_and_entropy
from megappo.models.microbatch import MicroBatch
from megappo.models.pipeline_model import Batch, PipelineModel, Trainee


class Policy:
    """A language model that scores responses at the sampling temperature. The reference is one."""

    def __init__(self, model: PipelineModel, temperature: float) -> None:
        self.model = model
        self.temperature = temperature

    @dispatched(Dispatch.DP)
    def compute_log_probs(self, batch: Batch) -> tuple[dict[str, Tensor], dict[str, float]]:
        """log_probs (b, r) and entropy (b, r), float32, of a padded batch (input_ids, attention_mask, response_mask)."""

        def score(logits: Tensor, micro_batch: MicroBatch) -> dict[str, Tensor]:
            log_probs, entropy = self._log_probs(logits, micro_batch)
            return {"log_probs": log_probs, "entropy": entropy}

        return self.model.score(batch, score), {}

    def _log_probs(self, logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        groups = self.model.groups
        return vocab_parallel_log_probs_and_entropy(
            logits,
            micro_batch.labels,
            vocab_size=self.model.shape.vocab_size,
            temperature=self.temperature,
            tp_rank=groups.coordinates.tp,
            tp_group=groups.tp_group if groups.layout.tp > 1 else None,
        )


class Actor(Policy):
    """The policy that is trained."""

    model: Trainee

    def __init__(self, model: Trainee, temperature: float, clip_range: float, entropy_coef: float) -> None:
        super().__init__(model, temperature)
        self.clip_range = clip_range
        self.entropy_coef = entropy_coef

    @dispatched(Dispatch.DP)
    def update(self, mini_batch: Batch, step: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """One optimizer step of PPO's clipped loss (arXiv:1707.06347) less the entropy bonus.

        mini_batch: input_ids, attention_mask, response_mask, old_log_probs, advantages. Returns global means over all tokens:
        pg_loss, entropy, clipfrac, approx_kl, loss; and grad_norm, lr.
        """

        def loss(logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs, entropy = self._log_probs(logits, micro_batch)
            old, advantages = micro_batch.fields["old_log_probs"], micro_batch.fields["advantages"]
            pg_loss, sums = ppo_clip_loss(log_probs, old, advantages, micro_batch.mask, self.clip_range)
            entropy_sum = (entropy * micro_batch.mask).sum()
            return pg_loss - self.entropy_coef * entropy_sum, {
                "pg_loss": pg_loss.detach(),
                "entropy": entropy_sum.detach(),
                **sums,
            }

        return {}, self.model.update(mini_batch, ("old_log_probs", "advantages"), loss, step)

    @dispatched(Dispatch.DP)
    def supervised_update(self, mini_batch: Batch, step: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """One optimizer step of the next-token loss on the responses (the warm start)."""

        def loss(logits: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            log_probs, _ = self._log_probs(logits, micro_batch)
            return -(log_probs * micro_batch.mask).sum(), {}

        return {}, self.model.update(mini_batch, (), loss, step)

    @dispatched(Dispatch.ALL)
    def parameter_norm(self) -> float:
        return self.model.parameter_norm()
