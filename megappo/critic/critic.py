"""The value model: values of response tokens, and their clipped regression. `Critic`.

legend: b samples of this data-parallel rank, r response width, n scored tokens
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megappo.algorithms.losses import value_loss
from megappo.controller.dispatch import Dispatch, dispatched
from megappo.models.microbatch import MicroBatch
from megappo.models.pipeline_model import Batch, LossSums, Trainee


class Critic:
    """A scalar head on a transformer; the value of a token is read in front of it, where it was chosen."""

    def __init__(self, model: Trainee, value_clip_range: float | None) -> None:
        self.model = model
        self.value_clip_range = value_clip_range

    @dispatched(Dispatch.DP)
    def compute_values(self, batch: Batch, num_micro_batches: int) -> tuple[dict[str, Tensor], dict[str, float]]:
        """values (b, r), float32, of a padded batch (input_ids, attention_mask, response_mask, micro_batch)."""
        return self.model.score(batch, num_micro_batches, lambda values, micro_batch: {"values": values}), {}

    @dispatched(Dispatch.DP)
    def update(self, mini_batch: Batch, num_micro_batches: int, step: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """One optimizer step of the value loss.

        mini_batch: input_ids, attention_mask, response_mask, micro_batch, values (of the rollout), returns. Returns global means
        over all tokens: loss, vf_clipfrac; and what `Trainee.update` does.
        """

        def loss(values: Tensor, micro_batch: MicroBatch) -> LossSums:
            old, returns = micro_batch.fields["values"], micro_batch.fields["returns"]
            vf_loss, sums = value_loss(values, old, returns, micro_batch.mask, self.value_clip_range)
            return LossSums(vf_loss, micro_batch.mask.sum(), {"vf_loss": vf_loss.detach()}, sums)

        return {}, self.model.update(mini_batch, num_micro_batches, ("values", "returns"), loss, step)
