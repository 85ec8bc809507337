"""What lives on one rank? `build_worker`: the models of every role, filled from their folders, behind one colocated worker."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from megappo.actor.actor import Actor, Policy
from megappo.checkpoint.load import load_weights
from megappo.checkpoint.save import Savable
from megappo.config.check import Plan
from megappo.config.schema_models import UpdateConfig
from megappo.controller.colocate import ColocatedWorker, create_colocated_worker
from megappo.critic.critic import Critic
from megappo.models.fresh import fill_fresh
from megappo.models.gpt import DTYPES, GPTChunk, LogProbsFrom, build_chunks
from megappo.models.microbatch import MicroBatching
from megappo.models.pipeline_model import PipelineModel, Trainee
from megappo.models.shape import ModelShape
from megappo.parallel_state.groups import RoleGroups, create_role_groups
from megappo.pp_weights.manager import WeightManager
from megappo.pp_weights.offload import ModelMemory
from megappo.rollout.engine import RolloutEngine
from megappo.rollout.group import EngineOnRank
from megappo.trainer.roles import CheckpointWriter, MemoryKeeper, RankProcess, WeightPublisher


@dataclass(frozen=True)
class RankModels:
    """One rank's share of the run."""

    worker: ColocatedWorker
    publisher: WeightPublisher


def build_worker(plan: Plan, roles: Sequence[str], engine: RolloutEngine | None = None) -> RankModels:
    """The models of `roles` ("actor", "critic", "reference") on this rank, and its engine. All ranks call it, in a torch world of
    theirs."""
    config = plan.config
    groups = create_role_groups({role: plan.layouts[role] for role in roles}, config.run.seed)
    dtype = config.model.dtype
    targets: dict[str, Any] = {}
    trained: dict[str, Savable] = {}
    memories: dict[str, ModelMemory] = {}

    log_probs_from = config.actor.log_probs_from
    chunks = _load(config.model.path, plan.shapes["actor"], groups["actor"], config.actor, dtype, log_probs_from)
    actor_model = Trainee(chunks, groups["actor"], _batching(config.actor), config.actor.optimizer, "actor")
    memories["actor"] = _memory_of(actor_model)
    trained["actor"] = Savable(chunks, groups["actor"], config.model.path)
    targets["actor"] = Actor(actor_model, config.rollout.temperature, config.algorithm, config.actor.entropy_coef)

    if "critic" in roles:
        chunks = _build(plan.shapes["critic"], groups["critic"], config.critic, dtype)
        if config.critic.start == "fresh":
            fill_fresh(chunks, groups["critic"], config.run.seed)
        else:
            load_weights(str(config.critic.path), chunks, groups["critic"])
        model = Trainee(chunks, groups["critic"], _batching(config.critic), config.critic.optimizer, "critic")
        memories["critic"] = _memory_of(model)
        trained["critic"] = Savable(chunks, groups["critic"], str(config.critic.path))
        targets["critic"] = Critic(model, config.critic.value_clip_range)
    if "reference" in roles:
        chunks = _load(
            str(config.reference.path), plan.shapes["reference"], groups["reference"], config.reference, dtype, log_probs_from
        )
        reference = PipelineModel(chunks, groups["reference"], _batching(config.actor))
        memories["reference"] = _memory_of(reference)
        targets["reference"] = Policy(reference, config.rollout.temperature)

    weights = config.pp_weights

    def make_manager(**options: Any) -> WeightManager:
        with groups["actor"].active():
            return WeightManager(
                actor_model.chunks,
                plan.shapes["actor"],
                groups["actor"],
                is_active=lambda: groups["actor"].is_active,
                bucket_bytes=weights.bucket_bytes,
                alignment_bytes=weights.alignment_bytes,
                **options,
            )

    mode = "full" if weights.zero_copy else weights.mode  # what is not copied lies in one buffer
    manager = make_manager(transport=weights.transport, gather=weights.gather, mode=mode, alternate=weights.zero_copy)
    make_exporter = functools.partial(make_manager, mode="bucketed")
    targets["weights"] = publisher = WeightPublisher(manager, make_exporter, memories["actor"])
    targets["checkpoint"] = CheckpointWriter(trained, memories)
    targets["memory"] = MemoryKeeper(memories, config.offload)
    targets["process"] = RankProcess()
    if engine is not None:
        targets["engine"] = EngineOnRank(engine)
    groups["weights"] = groups["actor"]

    def activate(role: str) -> AbstractContextManager[None]:
        return groups[role].active() if role in groups else nullcontext()

    return RankModels(create_colocated_worker(targets, activate), publisher)


def _load(
    path: str, shape: ModelShape, groups: RoleGroups, section: Any, dtype: str, log_probs_from: LogProbsFrom
) -> list[GPTChunk]:
    """This rank's chunks, filled from a Hugging Face folder or a checkpoint."""
    chunks = _build(shape, groups, section, dtype, log_probs_from)
    load_weights(path, chunks, groups)
    return chunks


def _build(
    shape: ModelShape, groups: RoleGroups, section: Any, dtype: str, log_probs_from: LogProbsFrom = "logits"
) -> list[GPTChunk]:
    with groups.active():
        return build_chunks(
            shape,
            groups,
            DTYPES[dtype],
            sequence_parallel=section.parallel.sequence_parallel,
            recompute=getattr(section, "recompute", False),
            log_probs_from=log_probs_from,
        )


def _memory_of(model: PipelineModel) -> ModelMemory:
    """The model's memory, brought back by whatever uses the model."""
    memory = ModelMemory(model.tensors)
    model.onload = memory.onload
    return memory


def _batching(section: UpdateConfig) -> MicroBatching:
    return MicroBatching(packed=section.packed)
