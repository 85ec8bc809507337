"""How does a list of micro-batches go through the pipeline? `run_schedule`, over megatron's own schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from megatron.core.pipeline_parallel import get_forward_backward_func

from megappo.parallel_state.groups import RoleGroups

Outcome = Any


def run_schedule(
    groups: RoleGroups,
    chunks: Sequence[Any],
    micro_batches: Sequence[Any],
    forward: Callable[[Any, Any], Any],
    on_last_stage: Callable[[Any, Any], Outcome],
    *,
    forward_only: bool,
) -> list[Outcome]:
    """Run every micro-batch through all chunks of all stages; every rank of the model must call it.

    forward(chunk, micro_batch) -> what the chunk hands on.
    on_last_stage(output of the last chunk, micro_batch) -> with forward_only anything, which is collected; else megatron's triple
    (sum of the losses, number of tokens as an int tensor, anything to collect). Gradients are then summed over micro-batches and
    data-parallel ranks and divided once by the global number of tokens.
    Returns what was collected, in the order of the micro-batches; empty on ranks that do not hold the last chunk.
    """
    assert groups.is_active, "a schedule runs inside groups.active()"
    layout = groups.layout
    if layout.vpp > 1 and len(micro_batches) % layout.pp:
        raise RuntimeError(f"the interleaved schedule needs a multiple of pp={layout.pp} micro-batches, got {len(micro_batches)}")

    def forward_step(iterator: Iterator[Any], chunk: Any) -> tuple[Any, Callable[..., Any]]:
        micro_batch = next(iterator)
        return forward(chunk, micro_batch), partial(_loss, micro_batch)

    def _loss(micro_batch: Any, output: Any, non_loss_data: bool = False) -> Any:
        return on_last_stage(output, micro_batch)

    iterators: Any = [iter(micro_batches) for _ in chunks]
    collected: list[Outcome] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=1,  # shapes travel with the tensors (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return collected
