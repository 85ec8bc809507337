"""Do the layouts fit the models and the ranks? Layouts of actor, critic and reference, and the world that they share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from megappo.config.schema import Config
from megappo.config.schema_models import ParallelConfig
from megappo.errors import UserError
from megappo.models.shape import ModelShape
from megappo.parallel_state.layout import ParallelLayout
from megappo.parallel_state.splits import one_of

Layouts = dict[str, ParallelLayout]
_SIZES = ("num_heads", "num_kv_heads", "head_dim", "ffn_size")


def role_layouts(config: Config, shapes: dict[str, ModelShape | None], problems: list[str]) -> Layouts:
    """{role: layout} of the roles in `shapes` that have a valid one. What a role shares with the actor is reported once."""
    layouts: Layouts = {}
    for role, shape in shapes.items():
        parallel: ParallelConfig = getattr(config, role).parallel
        if (
            role != "actor"
            and "actor" not in layouts
            and parallel == config.actor.parallel
            and _cut_alike(shape, shapes["actor"])
        ):
            continue
        found = list(_axis_problems(f"{role}.parallel", parallel))
        if shape is not None:
            found += _tp_problems(f"{role}.parallel", parallel.tp, shape)
            try:
                layout = _layout(f"{role}.parallel", parallel, shape)
            except UserError as error:
                found.append(str(error))
            else:
                if not found:
                    layouts[role] = layout
        problems += found
    return layouts


def world_problems(config: Config, layouts: Layouts, world_size: int | None, only_generating: int = 0) -> Iterator[str]:
    """Layouts that need other numbers of ranks than each other, or than a launcher has started.

    only_generating: ranks of the world that train nothing."""
    if config.run.launcher == "torchrun" and world_size is None:
        yield "run.launcher='torchrun', but RANK and WORLD_SIZE are not set; start with torchrun, or use run.launcher=local"
    if not layouts:
        return
    first, *others = layouts.values()
    for layout in others:
        if layout.world_size != first.world_size:
            yield (
                f"{layout.key} needs {_formula(layout)}, {first.key} needs {_formula(first)}, and all models share the same "
                f"ranks; {_mend_dp(layout, first.world_size)}"
            )
    needed = first.world_size + only_generating
    if world_size is not None and world_size != needed:
        more = f" and rollout.engines={only_generating} of their own" if only_generating else ""
        mend = f", or {_mend_dp(first, world_size - only_generating)}" if world_size > only_generating else ""
        yield f"WORLD_SIZE={world_size}, but {first.key} needs {_formula(first)}{more}; start {needed} ranks{mend}"


def rollout_tp_problems(config: Config, shape: ModelShape | None) -> Iterator[str]:
    """A tensor-parallel degree that the engine, the model or the hand-over of weights cannot have."""
    tp, actor_tp = config.rollout.tp, config.actor.parallel.tp
    if tp < 1:
        return  # out of range, and said so
    if config.rollout.engine == "hf" and tp > 1:
        yield f"rollout.tp={tp} is not possible with rollout.engine='hf'; set rollout.tp=1 or rollout.engine=vllm"
    if config.pp_weights.gather == "pp" and actor_tp > 1:
        yield from _shard_problems(config, shape)
    if shape is None:
        return
    kv = shape.num_kv_heads
    fits = [t for t in range(1, shape.num_heads + 1) if shape.num_heads % t == 0 and (kv % t == 0 or t % kv == 0)]
    if tp not in fits:
        yield (
            f"rollout.tp={tp} must divide num_attention_heads={shape.num_heads} and fit num_key_value_heads={kv}; "
            f"use {one_of(fits)}"
        )


def _shard_problems(config: Config, shape: ModelShape | None) -> Iterator[str]:
    """Shards go from a tp rank to the engine's worker of the same rank as they are, so both sides must cut alike."""
    tp = config.actor.parallel.tp
    shards = f"pp_weights.gather='pp' hands over actor.parallel.tp={tp} shards of each tensor"
    if config.rollout.engine == "hf":
        yield f"{shards}, and rollout.engine='hf' takes whole ones; set pp_weights.gather=full"
    elif config.rollout.tp != tp:
        yield f"{shards}, and rollout.tp={config.rollout.tp} cuts in another way; set rollout.tp={tp} or pp_weights.gather=full"
    if shape is None:
        return
    if shape.num_kv_heads % tp:
        yield (
            f"{shards}, and vLLM keeps copies of num_key_value_heads={shape.num_kv_heads} that tp does not divide; "
            f"set pp_weights.gather=full"
        )
    ours, theirs = (_vocabulary_cut(shape.vocab_size, tp, padded) for padded in (32 * tp, 64))
    if ours != theirs:
        yield (
            f"{shards}, and vLLM cuts vocab_size={shape.vocab_size} at {', '.join(map(str, theirs))}, Megatron at "
            f"{', '.join(map(str, ours))}; set pp_weights.gather=full"
        )


def _vocabulary_cut(vocab_size: int, tp: int, multiple: int) -> list[int]:
    """Where each tp rank but the first begins, of a vocabulary that is padded to a multiple and cut evenly."""
    rows = -(-vocab_size // multiple) * multiple // tp
    return [min(rank * rows, vocab_size) for rank in range(1, tp)]


def _layout(key: str, parallel: ParallelConfig, shape: ModelShape) -> ParallelLayout:
    own = {field.name for field in fields(ParallelLayout)}
    chosen = {field.name: getattr(parallel, field.name) for field in fields(ParallelConfig) if field.name in own}
    return ParallelLayout(num_layers=shape.num_layers, key=key, **chosen)


def _cut_alike(one: ModelShape | None, other: ModelShape | None) -> bool:
    """Whether the same layout fits both, or neither is known."""
    return all(getattr(one, size, None) == getattr(other, size, None) for size in ("num_layers", *_SIZES))


def _axis_problems(key: str, parallel: ParallelConfig) -> Iterator[str]:
    for axis, what in (("cp", "context"), ("ep", "expert")):
        if getattr(parallel, axis) > 1:
            yield f"{key}.{axis}={getattr(parallel, axis)}: {what} parallelism is not supported yet; set it to 1"
    if parallel.sequence_parallel and parallel.tp == 1:
        yield f"{key}.sequence_parallel=true needs {key}.tp of 2 or more, and it is 1; raise tp or turn it off"


def _tp_problems(key: str, tp: int, shape: ModelShape) -> Iterator[str]:
    if tp < 1:
        return  # the layout refuses it
    if misfits := shape.tp_misfits(tp):
        yield f"{key}.tp={tp} does not fit {' and '.join(misfits)}; use {one_of(shape.tp_degrees)}"


def _formula(layout: ParallelLayout) -> str:
    return f"tp x cp x pp x dp = {layout.tp} x {layout.cp} x {layout.pp} x {layout.dp} = {layout.world_size} ranks"


def _mend_dp(layout: ParallelLayout, world_size: int) -> str:
    rest = layout.world_size // layout.dp
    if world_size % rest == 0:
        return f"set {layout.key}.dp={world_size // rest}"
    return f"choose {layout.key}.tp, cp and pp so that their product (now {rest}) divides {world_size}"
