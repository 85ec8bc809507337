"""How a test's batch is cut into micro-batches, and which rows a rank then has."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megappo.algorithms.aggregation import loss_weights
from megappo.data.packing import BatchPlan, plan_batch
from megappo.models.microbatch import MicroBatching
from megappo.parallel_state.groups import RoleGroups
from megappo.parallel_state.layout import ParallelLayout

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Way:
    """size: samples of a micro-batch; or tokens: its budget; or plan: all of it."""

    size: int = 2
    tokens: int | None = None
    packed: bool = True
    plan: BatchPlan | None = None

    @property
    def batching(self) -> MicroBatching:
        return MicroBatching(packed=self.packed)

    def plan_of(self, batch: Batch, layout: ParallelLayout) -> BatchPlan:
        lengths = batch["attention_mask"].sum(dim=1).tolist()
        multiple = layout.pp if layout.vpp > 1 else 1
        size = None if self.tokens else self.size
        return self.plan or plan_batch(lengths, layout.dp, budget=self.tokens, size=size, multiple=multiple)

    def rows(self, groups: RoleGroups, batch: Batch) -> tuple[Batch, int]:
        """This rank's rows, with `micro_batch`, `sample_ids` and the weights of a mean over tokens; how many micro-batches."""
        plan = self.plan_of(batch, groups.layout)
        ends = torch.tensor(plan.rank_rows).cumsum(0).tolist()
        end, count = ends[groups.coordinates.dp], plan.rank_rows[groups.coordinates.dp]
        own = torch.tensor(plan.order[end - count : end], dtype=torch.long)
        weight, share = loss_weights(batch["response_mask"], "token_mean")
        columns = {"loss_weight": weight, "share": share, **batch}
        rows = {name: value[own] for name, value in columns.items()}
        return {
            **rows,
            "sample_ids": own,
            "micro_batch": torch.tensor(plan.micro_batch[end - count : end]),
        }, plan.num_micro_batches
