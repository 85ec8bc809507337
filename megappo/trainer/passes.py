"""How does a batch go through a model on all ranks? `Passes`: cut evenly, run, and its results put back in the batch's order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megappo.algorithms.skip import SkipReason
from megappo.config.check import Plan
from megappo.config.schema_models import UpdateConfig
from megappo.controller.worker import WorkerGroup
from megappo.data.balance import Costs, sequence_flops
from megappo.data.packing import plan_batch
from megappo.data.proto import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from megappo.models.shape import ModelShape

INPUTS = ("input_ids", "attention_mask", "response_mask", "sample_ids")


class Passes:
    """The passes of a run's models. Which rank and which micro-batch a sample goes to changes no result."""

    def __init__(self, plan: Plan, workers: WorkerGroup) -> None:
        self.plan, self.workers = plan, workers

    def score(self, role: str, method: str, batch: DataProto) -> DataProto:
        """The columns that a pass without gradients gives for INPUTS."""
        section = self._section(role)
        return self._run(role, method, batch.select(INPUTS), section.score_micro_batch_tokens, {})[0]

    def update(
        self, role: str, batch: DataProto, columns: Iterable[str], *, step: int, method: str = "update"
    ) -> tuple[dict[str, float], SkipReason | None]:
        """One optimizer step on INPUTS and these columns. Returns its metrics, among them how even the cut was; or why there was
        no step."""
        if not batch.batch["response_mask"].any():
            return {}, "no valid token"
        section = self._section(role)
        inputs = batch.select((*INPUTS, *columns))
        _, metrics, evenness = self._run(role, method, inputs, section.micro_batch_tokens, {"step": step})
        reason = metrics.pop("skipped", None)
        return ({}, reason) if reason else (metrics | evenness, None)

    def _run(
        self, role: str, method: str, batch: DataProto, budget: int | None, kwargs: dict[str, Any]
    ) -> tuple[DataProto, dict[str, Any], dict[str, float]]:
        section, layout = self._section(role), self.plan.layouts[role]
        padded, num_padding = pad_dataproto_to_divisor(batch, layout.dp)  # so that no rank runs fewer rows than the others
        lengths = padded.batch["attention_mask"].sum(dim=1).tolist()
        costs = _flops(self.plan.shapes[role], lengths) if section.balance == "flops" else None
        cut = plan_batch(
            lengths,
            layout.dp,
            budget=budget,
            size=None if budget else section.micro_batch_size,
            multiple=layout.pp if layout.vpp > 1 else 1,  # megatron's interleaved schedule wants that
            costs=costs,
        )
        padded.reorder(cut.order)
        tensors = padded.tensors() | {"micro_batch": torch.tensor(cut.micro_batch)}
        columns, metrics = self.workers.call(role, method, tensors, num_micro_batches=cut.num_micro_batches, **kwargs)
        results = DataProto.from_dict(columns, num_rows=len(padded))
        results.reorder(cut.restore)
        return unpad_dataproto(results, num_padding), metrics, cut.describe(lengths if costs is None else costs)

    def _section(self, role: str) -> UpdateConfig:
        """The reference runs as the actor does."""
        return self.plan.config.critic if role == "critic" else self.plan.config.actor


def _flops(shape: ModelShape, lengths: list[int]) -> Costs:
    embedding = 0 if shape.tied and shape.head == "lm" else shape.vocab_size * shape.hidden_size  # looked up, not multiplied
    return sequence_flops(lengths, shape.num_parameters - embedding, shape.num_layers, shape.num_heads * shape.head_dim)
