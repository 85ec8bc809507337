"""A model cut over the ranks, and what one can do with it: score a batch, take an optimizer step. `PipelineModel`, `Trainee`.

Every rank of the model's groups must call each method. Results are on the ranks of the last stage.

legend: b samples of this data-parallel rank, r response width, n scored tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from torch import Tensor

from megappo.algorithms.skip import SkipReason, skip_flags, skip_reason
from megappo.config.schema_models import OptimizerConfig
from megappo.errors import RunFailed
from megappo.models.gpt import GPTChunk
from megappo.models.lr_schedule import lr_scheduler
from megappo.models.microbatch import NUMBER, MicroBatch, MicroBatching, make_micro_batches
from megappo.models.unpack import unpack_responses
from megappo.parallel_state.device import device, has_cuda
from megappo.parallel_state.groups import RoleGroups
from megappo.parallel_state.mcore_compat import gloo_has_no_avg
from megappo.parallel_state.schedule import run_schedule

if TYPE_CHECKING:
    from megappo.pp_weights.offload import Kind

Batch = Mapping[str, Tensor]

_CPU_BF16_MULTIPLE = 64
"""Packs are padded to a multiple of so many tokens where torch computes bfloat16 with oneDNN: it compiles and keeps a kernel for
each shape that it meets, and packs of any length would meet a new one each time."""

Score = Callable[[Tensor, MicroBatch], dict[str, Tensor]]
"""(output of the last chunk, micro-batch) -> columns (n,)"""


class LossSums(NamedTuple):
    """What a micro-batch adds to the loss of an optimizer step and to its metrics."""

    loss: Tensor
    """sum of weight x token loss"""
    share: Tensor
    """what it adds to the divisor, an integer: see `algorithms.aggregation`"""
    parts: Mapping[str, Tensor]
    """terms of the loss, which become means by the same divisor"""
    token_sums: Mapping[str, Tensor]
    """sums over valid tokens, which become means over these"""


Loss = Callable[[Tensor, MicroBatch], LossSums]
"""(output of the last chunk, micro-batch) -> sums"""


class PipelineModel:
    """The chunks of one model on this rank, with its groups and the way in which its batches are cut.

    onload: called with the kinds of tensors that are about to be used, for a model whose memory may be away in between
    (`pp_weights.offload.ModelMemory.onload`)."""

    def __init__(self, chunks: Sequence[GPTChunk], groups: RoleGroups, batching: MicroBatching) -> None:
        self.chunks: list[GPTChunk] = list(chunks)
        self.runnable: list[Any] = list(chunks)
        self.onload: Callable[..., object] = lambda *kinds: None
        self.groups = groups
        self.shape = chunks[0].shape
        config = chunks[0].config
        self.batching = replace(
            batching,
            length_multiple=math.lcm(
                groups.layout.tp if config.sequence_parallel else 1,
                _CPU_BF16_MULTIPLE if config.bf16 and batching.packed and not has_cuda() else 1,
            ),
        )

    def score(self, batch: Batch, num_micro_batches: int, score: Score) -> dict[str, Tensor]:
        """Forward pass. Returns columns (b, r) float32, zero outside the response mask; nothing off the last stage."""
        self.onload("parameters")
        micro_batches = self._micro_batches(batch, num_micro_batches, ())
        with self.groups.active(), torch.no_grad():
            found = self._run(micro_batches, score, forward_only=True)
        if not self.groups.is_last_stage:
            return {}
        return unpack_responses(micro_batches, found, batch["response_mask"].shape)

    def tensors(self, kind: Kind) -> Iterator[Tensor]:
        """All tensors of a kind that this rank holds for the model, buffers of the chunks among the parameters."""
        if kind == "parameters":
            for chunk in self.chunks:
                yield from chunk.parameters()
                yield from chunk.buffers()

    def _run(self, micro_batches: list[MicroBatch], on_last_stage: Callable[..., Any], forward_only: bool) -> list[Any]:
        found = run_schedule(self.groups, self.runnable, micro_batches, _forward, on_last_stage, forward_only=forward_only)
        for chunk in self.chunks:
            chunk.forget_pass()
        return found

    def _micro_batches(self, batch: Batch, num_micro_batches: int, fields: tuple[str, ...]) -> list[MicroBatch]:
        names = ("input_ids", "attention_mask", "response_mask", NUMBER, *fields)
        columns = {name: batch[name].to(device()) for name in names}
        return make_micro_batches(columns, num_micro_batches, self.batching, fields)


class Trainee(PipelineModel):
    """A model with Megatron's DDP, optimizer and parameter scheduler."""

    def __init__(
        self, chunks: Sequence[GPTChunk], groups: RoleGroups, batching: MicroBatching, optimizer: OptimizerConfig, name: str
    ) -> None:
        super().__init__(chunks, groups, batching)
        self.name = name
        ddp_config = gloo_has_no_avg(
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=optimizer.distributed
            )
        )
        with groups.active():
            self.runnable = [
                DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=i > 0)
                for i, chunk in enumerate(self.chunks)
            ]
            self.optimizer = get_megatron_optimizer(_megatron_config(optimizer, self.chunks[0].config), self.runnable)
        config = self.chunks[0].config
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        self.scheduler = lr_scheduler(self.optimizer, optimizer)

    def update(self, batch: Batch, num_micro_batches: int, fields: tuple[str, ...], loss: Loss, step: int) -> dict[str, Any]:
        """One optimizer step on the sum of `loss` over all tokens of all data-parallel ranks, divided once by that of the shares.

        step: trainer step, from 1; it sets the learning rate. Returns global metrics: parts of the loss, means over tokens, the
        `padding_share` of the computed tokens, `grad_norm` and `lr`. A step whose loss or gradient is not finite, or that has no
        valid token, changes neither weights nor optimizer nor learning rate, on any rank: then only `skipped`, the reason.
        """
        self.onload("parameters", "gradients", "optimizer")
        micro_batches = self._micro_batches(batch, num_micro_batches, fields)

        def on_last_stage(output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, _Found]:
            sums = loss(output, micro_batch)
            parts = {"loss": sums.loss.detach(), **sums.parts}
            counts = torch.tensor((micro_batch.num_tokens, micro_batch.input_ids.numel()))
            found = _Found(
                parts,
                sums.token_sums,
                {"share": sums.share, "tokens": micro_batch.mask.sum(), "real": counts[0], "computed": counts[1]},
            )
            return sums.loss, sums.share.int(), found

        with self.groups.active():
            for chunk in self.runnable:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            found = self._run(micro_batches, on_last_stage, forward_only=False)
            reason = self._skip_reason(found)
            if reason is not None:
                return {"skipped": reason}
            metrics = self._global_means(found)
            if step > self.scheduler.num_steps:
                self.scheduler.step(step - self.scheduler.num_steps)
            succeeded, grad_norm, _ = self.optimizer.step()
            if not succeeded:
                raise RunFailed(f"{self.name}: the optimizer refused the step (gradient overflow)")
        return {**metrics, "grad_norm": float(grad_norm or 0.0), "lr": float(self.optimizer.param_groups[0]["lr"])}

    def tensors(self, kind: Kind) -> Iterator[Tensor]:
        """Gradients: Megatron's buffers; what hangs on parameters and their master copies are views of them, since gradients are
        reduced in float32. Optimizer: the parameters that it steps and its state, which is there from the first step on."""
        yield from super().tensors(kind)
        if kind == "gradients":
            for chunk in self.runnable:
                yield from (buffer.grad_data for buffer in chunk.buffers + chunk.expert_parallel_buffers)
        if kind == "optimizer":
            for optimizer in self._torch_optimizers():
                for group in optimizer.param_groups:
                    yield from group["params"]
                for state in optimizer.state.values():
                    yield from (value for value in state.values() if isinstance(value, Tensor))

    def parameter_norm(self) -> float:
        """L2 norm of all parameters of the model, each counted once; the same on every rank."""
        self.onload("parameters")
        with self.groups.active():
            from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
            from megatron.core.transformer.module import param_is_not_shared

            counted = [
                p.detach()
                for chunk in self.chunks
                for p in chunk.parameters()
                if param_is_not_shared(p) and param_is_not_tensor_parallel_duplicate(p)
            ]
            total = torch.zeros(1, dtype=torch.float64)
            for p in counted:
                total += p.float().square().sum().double().cpu()
            total = total.to(device())
            for group in (self.groups.tp_group, self.groups.pp_group):
                dist.all_reduce(total, group=group)
        return float(total.sqrt())

    def _torch_optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """What Megatron's optimizers drive; those of a rank without parameters drive nothing."""
        chained = self.optimizer.chained_optimizers if isinstance(self.optimizer, ChainedOptimizer) else [self.optimizer]
        yield from (wrapped.optimizer for wrapped in chained if wrapped.optimizer is not None)

    def _global_means(self, found: Sequence[_Found]) -> dict[str, float]:
        """Metrics of all micro-batches and data-parallel ranks; empty off the last stage."""
        if not self.groups.is_last_stage:
            return {}
        columns = [{**micro.parts, **micro.token_sums, **micro.counts} for micro in found]
        names = list(columns[0])
        sums = torch.stack([torch.stack([column[name].detach().double().cpu() for name in names]) for column in columns]).sum(0)
        sums = sums.to(device())
        dist.all_reduce(sums, group=self.groups.dp_group)
        total = dict(zip(names, sums.tolist(), strict=True))
        means = {name: total[name] / max(total["share"], 1.0) for name in found[0].parts}
        means |= {name: total[name] / max(total["tokens"], 1.0) for name in found[0].token_sums}
        return {**means, "padding_share": 1 - total["real"] / total["computed"]}

    def _skip_reason(self, found: Sequence[_Found]) -> SkipReason | None:
        """Why this optimizer step must not happen; the same answer on every rank of the world."""
        probe = torch.zeros((), device=device())
        for chunk in self.runnable:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                probe += buffer.grad_data.sum()
        zero = torch.zeros((), device=device())
        loss = torch.stack([micro.parts["loss"] for micro in found]).sum() if found else zero
        tokens = torch.stack([micro.counts["tokens"] for micro in found]).sum() if found else zero
        flags = skip_flags(loss, probe, tokens).to(device())
        dist.all_reduce(flags)
        return skip_reason(flags.tolist())


class _Found(NamedTuple):
    """What the last stage keeps of a micro-batch."""

    parts: Mapping[str, Tensor]
    token_sums: Mapping[str, Tensor]
    counts: Mapping[str, Tensor]
    """`share` and `tokens`, the divisors; `real` and `computed` tokens"""


def _forward(chunk: Any, micro_batch: MicroBatch) -> Tensor:
    out: Tensor = chunk(
        input_ids=micro_batch.input_ids,
        positions=micro_batch.positions,
        attention=micro_batch.attention,
        scored=micro_batch.scored,
    )
    return out


def _megatron_config(optimizer: OptimizerConfig, model_config: Any) -> MegatronOptimizerConfig:
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.lr * optimizer.min_lr_ratio,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad,
        bf16=model_config.bf16,
        params_dtype=model_config.params_dtype,
        use_distributed_optimizer=optimizer.distributed,
    )
