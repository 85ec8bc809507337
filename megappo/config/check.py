"""Can this config run? `check_config`: every cross-check at once, before any process starts, and without torch.

Each refusal is one line: key, value, why, fix. What holds is returned as a `Plan`, so that no one derives it twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megappo.config.check_algorithm import warn_of_algorithm
from megappo.config.check_engines import engine_problems, engine_ranks
from megappo.config.check_files import data_problems, extras_problems, reward_problems, tokenizer_problems, weights_problems
from megappo.config.check_layouts import role_layouts, rollout_tp_problems, world_problems
from megappo.config.check_values import batch_problems, range_problems, trained_roles
from megappo.config.resolve import Command, resolve, uses_critic
from megappo.config.schema import Config
from megappo.errors import UserError
from megappo.models.families import shape_of
from megappo.models.shape import Head, ModelShape
from megappo.parallel_state.layout import ParallelLayout

log = logging.getLogger("megappo")

_HEADS: dict[str, Head] = {"actor": "lm", "critic": "value", "reference": "lm"}


@dataclass(frozen=True)
class Plan:
    """What follows from a config that holds: sizes and layouts by role ("actor", and for training "critic" where it is
    used, "reference").

    engine_ranks: the rank of each engine."""

    config: Config
    shapes: Mapping[str, ModelShape]
    layouts: Mapping[str, ParallelLayout]
    engine_ranks: tuple[int, ...] = ()

    @property
    def training_ranks(self) -> int:
        """Ranks that hold the models; they are the first of the world."""
        return self.layouts["actor"].world_size

    @property
    def world_size(self) -> int:
        """All ranks: those that train, and those that only generate."""
        return max([self.training_ranks, *(rank + 1 for rank in self.engine_ranks)])


def joined_world_size(config: Config, environ: Mapping[str, str]) -> int | None:
    """Ranks of the job that a launcher started around this process; None where the command starts the ranks itself."""
    if config.run.launcher == "local" or "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    return int(environ["WORLD_SIZE"])


def check_here(config: Config, command: Command, environ: Mapping[str, str]) -> Plan:
    """`check_config` with the ranks that a launcher has started around this process, if it has."""
    local_world_size = environ.get("LOCAL_WORLD_SIZE")
    return check_config(config, joined_world_size(config, environ), command, int(local_world_size) if local_world_size else None)


def check_config(
    config: Config, world_size: int | None = None, command: Command = "train", local_world_size: int | None = None
) -> Plan:
    """The plan of a config that can run.

    world_size: ranks that a launcher has started (`joined_world_size`), or None.
    local_world_size: how many of them are on this host.
    Raises UserError with one line for each thing that does not hold.
    """
    config = resolve(config, command)
    problems: list[str] = list(range_problems(config, command))
    shapes = _shapes(config, command, problems)
    problems += weights_problems(config, command)
    layouts: dict[str, ParallelLayout] = {}
    training_ranks: int | None = None
    on_ranks: tuple[int, ...] = ()
    if command != "eval":  # an engine is all that it needs
        layouts = role_layouts(config, shapes, problems)
        training_ranks = layouts["actor"].world_size if "actor" in layouts else None
        on_ranks = engine_ranks(config, training_ranks or 0, command) if config.rollout.engines > 0 else ()
        only_generating = len(on_ranks) if config.rollout.own_ranks else 0
        problems += world_problems(config, layouts, world_size, only_generating)
        problems += _transport_problems(config, world_size, local_world_size)
    elif world_size is not None and world_size > 1:
        problems.append(f"WORLD_SIZE={world_size}, but an evaluation is one process; start `megappo eval` without torchrun")
    problems += engine_problems(config, training_ranks, command)
    if trained_roles(config, command):
        problems += batch_problems(config, {role: layout.dp for role, layout in layouts.items()}, command)
    if command != "import":  # a conversion neither reads data nor generates
        if shapes["actor"] is not None:
            problems += _length_problems(config, shapes["actor"])
        problems += rollout_tp_problems(config, shapes["actor"])
        problems += _zero_copy_problems(config)
        problems += _cache_problems(config, shapes["actor"])
        if command != "sft" or config.sft.evaluate_every:
            problems += reward_problems(config, command)
        problems += data_problems(config, command)
        problems += extras_problems(config)
    problems += tokenizer_problems(config)
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    if command == "train":
        _warn_of_filtered_sampling(config)
        warn_of_algorithm(config)
    return Plan(config, {role: shape for role, shape in shapes.items() if shape is not None}, layouts, on_ranks)


def _shapes(config: Config, command: Command, problems: list[str]) -> dict[str, ModelShape | None]:
    """{role: sizes, or None where they cannot be read}. All roles read the actor's token ids, so the vocabulary is one."""
    paths = {"actor": config.model.path}
    if command == "train":
        paths |= {"critic": str(config.critic.path)} if uses_critic(config) else {}
        paths |= {"reference": str(config.reference.path)}
    shapes: dict[str, ModelShape | None] = {}
    for role, path in paths.items():
        if role != "actor" and path == config.model.path and shapes["actor"] is None:
            shapes[role] = None  # reported once, for the actor
            continue
        try:
            shape = shape_of(path, head=_HEADS[role] if command != "import" else None)
        except UserError as error:
            shapes[role] = None
            problems.append(str(error) if role == "actor" else str(error).replace("model.path=", f"{role}.path="))
            continue
        shapes[role] = shape
        actor = shapes["actor"]
        if actor is not None and shape.vocab_size != actor.vocab_size:
            problems.append(
                f"{role}.path={path!r} has vocab_size={shape.vocab_size}, but model.path has {actor.vocab_size}; "
                f"use a model with the same tokenizer"
            )
    return shapes


def _length_problems(config: Config, shape: ModelShape) -> Iterator[str]:
    prompt, new = config.rollout.max_prompt_tokens, config.rollout.max_new_tokens
    if prompt + new > shape.max_positions:
        yield (
            f"rollout.max_prompt_tokens={prompt} + rollout.max_new_tokens={new} = {prompt + new} exceeds the model's "
            f"max_position_embeddings={shape.max_positions}; lower them by {prompt + new - shape.max_positions} together"
        )


def _cache_problems(config: Config, shape: ModelShape | None) -> Iterator[str]:
    """The engine's cache must hold at least one sequence of the longest kind."""
    rollout = config.rollout
    if shape is None or rollout.engine != "vllm" or rollout.tp < 1:
        return
    tokens = rollout.max_prompt_tokens + rollout.max_new_tokens
    itemsize = 2 if rollout.dtype == "bfloat16" else 4
    needed = 2 * shape.num_layers * -(-shape.num_kv_heads // rollout.tp) * shape.head_dim * itemsize * tokens
    if 0 < rollout.kv_cache_bytes < needed:
        yield (
            f"rollout.kv_cache_bytes={rollout.kv_cache_bytes} holds no sequence of {tokens} tokens "
            f"(max_prompt_tokens + max_new_tokens), which takes {needed} bytes; give at least that"
        )


def _zero_copy_problems(config: Config) -> Iterator[str]:
    """What an engine that reads the weights in the buffer cannot do. That it runs on a CPU is looked at where it is made."""
    rollout, key = config.rollout, "pp_weights.zero_copy=true"
    if not config.pp_weights.zero_copy:
        return
    if rollout.engine == "hf":
        yield f"{key} is for vLLM, and rollout.engine='hf'; turn it off or set rollout.engine=vllm"
    if rollout.tp > 1:
        yield f"{key} needs whole tensors, and rollout.tp={rollout.tp} workers cut them; turn it off or set rollout.tp=1"
    if rollout.dtype != config.model.dtype:
        yield (
            f"{key} reads the weights as they were trained, in model.dtype={config.model.dtype!r}, and "
            f"rollout.dtype={rollout.dtype!r}; make them equal or turn it off"
        )
    if config.pp_weights.mode == "bucketed":
        yield f"{key} needs the whole model in one buffer, and pp_weights.mode='bucketed'; use mode=full or turn it off"


def _transport_problems(config: Config, world_size: int | None, local_world_size: int | None) -> Iterator[str]:
    alignment = config.pp_weights.alignment_bytes
    if alignment < 16 or alignment & (alignment - 1):
        yield f"pp_weights.alignment_bytes={alignment} must be a power of two, at least 16; use 16, 256 or 512"
    spread = world_size is not None and local_world_size is not None and local_world_size < world_size
    # Ranks that only generate may be elsewhere; whether the others are on one host shows once they have met.
    if config.pp_weights.transport == "shared_memory" and spread and not config.rollout.own_ranks:
        yield (
            f"pp_weights.transport='shared_memory' needs all {world_size} ranks on one host, but this host has "
            f"{local_world_size}; use pp_weights.transport=auto or collective"
        )


def _warn_of_filtered_sampling(config: Config) -> None:
    """The trainer's log-probs are over the whole vocabulary; an engine that cuts it down reports others."""
    for key, value, neutral in (("top_p", config.rollout.top_p, 1.0), ("top_k", config.rollout.top_k, -1)):
        if value != neutral:
            log.warning(
                "rollout.%s=%s: the engine samples from a part of the vocabulary and the trainer scores over all of it, so "
                "their log-probs differ; rollout.%s=%s keeps them equal",
                key,
                value,
                key,
                neutral,
            )
