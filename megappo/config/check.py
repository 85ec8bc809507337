"""Can this config run? `check_config`: every cross-check at once, before any process starts, and without torch.

Each refusal is one line: key, value, why, fix. What holds is returned as a `Plan`, so that no one derives it twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from megappo.config.check_files import data_problems, reward_problems, tokenizer_problems, weights_problems
from megappo.config.check_values import batch_problems, range_problems
from megappo.config.resolve import Command, resolve
from megappo.config.schema import Config, ParallelConfig
from megappo.errors import UserError
from megappo.models.families import shape_of
from megappo.models.shape import ModelShape
from megappo.parallel_state.layout import ParallelLayout

log = logging.getLogger("megappo")
T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """What follows from a config that holds: sizes and layouts of the three models, and the number of ranks."""

    config: Config
    actor_shape: ModelShape
    critic_shape: ModelShape
    reference_shape: ModelShape
    actor: ParallelLayout
    critic: ParallelLayout
    reference: ParallelLayout

    @property
    def world_size(self) -> int:
        return self.actor.world_size

    @property
    def samples_per_step(self) -> int:
        return self.config.trainer.batch_size * self.config.rollout.n


def joined_world_size(config: Config, environ: Mapping[str, str]) -> int | None:
    """Ranks of the job that a launcher started around this process; None where the command starts the ranks itself."""
    if config.run.launcher == "local" or "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    return int(environ["WORLD_SIZE"])


def check_config(
    config: Config, world_size: int | None = None, command: Command = "train", local_world_size: int | None = None
) -> Plan:
    """The plan of a config that can run.

    world_size: ranks that a launcher has started (`joined_world_size`), or None. local_world_size: how many of them are on this host.
    Raises UserError with one line for each thing that does not hold.
    """
    config = resolve(config, command)
    problems: list[str] = list(range_problems(config, command))
    shape = _attempt(problems, lambda: shape_of(config.model.path))
    critic_shape, reference_shape = shape, shape
    if command == "train":
        critic_shape = _shape_of_role(problems, config, shape, "critic", config.critic.path)
        reference_shape = _shape_of_role(problems, config, shape, "reference", config.reference.path)
    problems += weights_problems(config, command)
    actor, critic, reference = _layouts(problems, config, shape, critic_shape, reference_shape, command)
    layouts = [layout for layout in (actor, critic, reference) if layout is not None]
    problems += _world_problems(config, layouts, world_size)
    if not any(layout.dp < 1 for layout in layouts) and layouts:
        problems += batch_problems(config, {layout.key.partition(".")[0]: layout.dp for layout in layouts}, command)
    if shape is not None:
        problems += _length_problems(config, shape)
    if command == "train":
        problems += _rollout_problems(config, shape, actor)
        problems += _transport_problems(config, world_size, local_world_size)
        problems += reward_problems(config)
        _warn_of_filtered_sampling(config)
    problems += tokenizer_problems(config)
    problems += data_problems(config, command)
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    assert shape and critic_shape and reference_shape and actor and critic and reference
    return Plan(config, shape, critic_shape, reference_shape, actor, critic, reference)


def _attempt(problems: list[str], function: Callable[[], T]) -> T | None:
    try:
        return function()
    except UserError as error:
        problems.append(str(error))
        return None


def _shape_of_role(
    problems: list[str], config: Config, actor_shape: ModelShape | None, role: str, path: str | None
) -> ModelShape | None:
    """Sizes of the critic or the reference. Both read the actor's token ids, so the vocabulary must be the same."""
    assert path is not None  # resolved
    head = "value" if role == "critic" else "lm"
    if path == config.model.path and actor_shape is None:
        return None  # reported once, for the actor
    try:
        shape = shape_of(path, head=head)
    except UserError as error:
        problems.append(str(error).replace("model.path=", f"{role}.path="))
        return None
    if actor_shape is not None and shape.vocab_size != actor_shape.vocab_size:
        problems.append(
            f"{role}.path={path!r} has vocab_size={shape.vocab_size}, model.path has {actor_shape.vocab_size}; "
            f"use a model with the same tokenizer"
        )
    return shape


def _layouts(
    problems: list[str],
    config: Config,
    shape: ModelShape | None,
    critic_shape: ModelShape | None,
    reference_shape: ModelShape | None,
    command: Command,
) -> tuple[ParallelLayout | None, ParallelLayout | None, ParallelLayout | None]:
    """Layouts of actor, critic and reference. A layout shared with the actor is checked, and reported, once."""
    actor = _layout(problems, "actor", config.actor.parallel, shape)
    if command == "sft":
        return actor, actor, actor
    others = []
    for role, parallel, role_shape in (
        ("critic", config.critic.parallel, critic_shape),
        ("reference", config.reference.parallel, reference_shape),
    ):
        assert parallel is not None  # resolved
        same = parallel == config.actor.parallel and role_shape and shape and _cut_alike(role_shape, shape)
        if same and actor is None:
            others.append(None)
        else:
            others.append(_layout(problems, role, parallel, role_shape))
    return actor, others[0], others[1]


def _cut_alike(one: ModelShape, other: ModelShape) -> bool:
    sizes = ("num_layers", "num_heads", "num_kv_heads", "ffn_size")
    return all(getattr(one, size) == getattr(other, size) for size in sizes)


def _layout(problems: list[str], role: str, parallel: ParallelConfig, shape: ModelShape | None) -> ParallelLayout | None:
    key = f"{role}.parallel"
    before = len(problems)
    for axis, what in (("cp", "context"), ("ep", "expert")):
        if getattr(parallel, axis) > 1:
            problems.append(f"{key}.{axis}={getattr(parallel, axis)} is not supported yet ({what} parallelism); set it to 1")
    if parallel.sequence_parallel and parallel.tp == 1:
        problems.append(f"{key}.sequence_parallel=true needs {key}.tp of 2 or more (it is 1); raise tp or turn it off")
    if shape is None:
        return None
    if parallel.tp > 1:
        for size in ("num_heads", "num_kv_heads", "ffn_size"):
            problems += _not_divided(f"{key}.tp", parallel.tp, size, getattr(shape, size))
    layout = _attempt(
        problems,
        lambda: ParallelLayout(
            num_layers=shape.num_layers,
            tp=parallel.tp,
            pp=parallel.pp,
            vpp=parallel.vpp,
            cp=parallel.cp,
            ep=parallel.ep,
            dp=parallel.dp,
            layers_per_stage=parallel.layers_per_stage,
            key=key,
        ),
    )
    return layout if len(problems) == before else None


def _not_divided(key: str, degree: int, size: str, value: int) -> Iterator[str]:
    if value % degree:
        fits = [d for d in range(1, value + 1) if value % d == 0]
        nearest = [max((d for d in fits if d < degree), default=1), min((d for d in fits if d > degree), default=1)]
        choice = " or ".join(str(d) for d in dict.fromkeys(nearest) if d > 1 or len(set(nearest)) == 1) or "1"
        yield f"{key}={degree} does not divide {size}={value}; use {choice}"


def _world_problems(config: Config, layouts: list[ParallelLayout], world_size: int | None) -> Iterator[str]:
    if config.run.launcher == "torchrun" and world_size is None:
        yield "run.launcher='torchrun', but RANK and WORLD_SIZE are not set; start with torchrun, or use run.launcher=local"
    if not layouts:
        return
    first = layouts[0]
    for layout in layouts[1:]:
        if layout.world_size != first.world_size:
            yield (
                f"{layout.key} needs {_formula(layout)}, {first.key} needs {_formula(first)}: all models share the same ranks; "
                f"{_mend_dp(layout, first.world_size)}"
            )
    if world_size is not None and world_size != first.world_size:
        yield (
            f"WORLD_SIZE={world_size}, but {first.key} needs {_formula(first)}; start {first.world_size} ranks, "
            f"or {_mend_dp(first, world_size)}"
        )


def _formula(layout: ParallelLayout) -> str:
    degrees = f"{layout.tp} x {layout.cp} x {layout.pp} x {layout.dp}"
    return f"tp x cp x pp x dp = {degrees} = {layout.world_size} ranks"


def _mend_dp(layout: ParallelLayout, world_size: int) -> str:
    rest = layout.world_size // layout.dp
    if world_size % rest == 0:
        return f"set {layout.key}.dp={world_size // rest}"
    return f"choose {layout.key}.tp, cp and pp so that their product ({rest}) divides {world_size}"


def _length_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    prompt, new = config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
    if prompt + new > shape.max_positions:
        yield (
            f"rollout.max_prompt_tokens={prompt} + rollout.max_new_tokens={new} = {prompt + new} exceeds the model's "
            f"max_position_embeddings={shape.max_positions}; lower them by {prompt + new - shape.max_positions} together"
        )


def _rollout_problems(config: Config, shape: ModelShape | None, actor: ParallelLayout | None) -> Iterator[str]:
    rollout, gather = config.rollout, config.pp_weights.gather
    if rollout.engine == "hf" and rollout.tp > 1:
        yield f"rollout.tp={rollout.tp} is not possible with rollout.engine=hf; set rollout.tp=1 or rollout.engine=vllm"
    if shape is not None and rollout.tp > 1:
        yield from _not_divided("rollout.tp", rollout.tp, "num_heads", shape.num_heads)
        if shape.num_kv_heads % rollout.tp and rollout.tp % shape.num_kv_heads:
            yield from _not_divided("rollout.tp", rollout.tp, "num_kv_heads", shape.num_kv_heads)
    if actor is not None and rollout.tp > 0 and actor.world_size % rollout.tp:
        yield from _not_divided("rollout.tp", rollout.tp, "the number of ranks", actor.world_size)
    actor_tp = config.actor.parallel.tp
    if gather == "pp" and rollout.tp != actor_tp:
        yield (
            f"pp_weights.gather='pp' keeps tensor-parallel shards in place, but rollout.tp={rollout.tp} is not "
            f"actor.parallel.tp={actor_tp}; set rollout.tp={actor_tp} or pp_weights.gather=full"
        )
    if shape is not None and rollout.engine == "vllm" and rollout.tp > 0:
        yield from _cache_problems(config, shape)


def _cache_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    """The engine's cache must hold at least one sequence of the longest kind."""
    rollout = config.rollout
    tokens = rollout.max_prompt_tokens + rollout.max_new_tokens
    itemsize = 2 if rollout.dtype == "bfloat16" else 4
    needed = 2 * shape.num_layers * -(-shape.num_kv_heads // rollout.tp) * shape.head_dim * itemsize * tokens
    if 0 < rollout.kv_cache_bytes < needed:
        yield (
            f"rollout.kv_cache_bytes={rollout.kv_cache_bytes} holds no sequence of {tokens} tokens "
            f"(max_prompt_tokens + max_new_tokens), which takes {needed} bytes; give at least {needed}"
        )


def _transport_problems(config: Config, world_size: int | None, local_world_size: int | None) -> Iterator[str]:
    alignment = config.pp_weights.alignment_bytes
    if alignment < 16 or alignment & (alignment - 1):
        yield f"pp_weights.alignment_bytes={alignment} must be a power of two, at least 16; use 16, 256 or 512"
    spread = world_size is not None and local_world_size is not None and local_world_size < world_size
    if config.pp_weights.transport == "shared_memory" and spread:
        yield (
            f"pp_weights.transport='shared_memory' needs all {world_size} ranks on one host, but this host has "
            f"{local_world_size}; use pp_weights.transport=auto or collective"
        )


def _warn_of_filtered_sampling(config: Config) -> None:
    """The trainer's log-probs are over the whole vocabulary; an engine that cuts it down reports others."""
    for key, value, neutral in (("top_p", config.rollout.top_p, 1.0), ("top_k", config.rollout.top_k, -1)):
        if value != neutral:
            log.warning(
                "rollout.%s=%s: the engine samples from a part of the vocabulary, the trainer scores over all of it, so that "
                "their log-probs differ; %s=%s keeps them equal",
                key,
                value,
                key,
                neutral,
            )
