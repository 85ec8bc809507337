"""What lives on one rank? `build_worker`: the models of every role, filled from their folders, behind one colocated worker."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from megappo.actor.actor import Actor, Policy
from megappo.checkpoint.load import load_weights
from megappo.checkpoint.save import Savable, save_step
from megappo.config.check import Plan
from megappo.config.schema import UpdateConfig
from megappo.controller.colocate import ColocatedWorker, create_colocated_worker
from megappo.controller.dispatch import Dispatch, dispatched
from megappo.critic.critic import Critic
from megappo.models.gpt import DTYPES, GPTChunk, build_chunks
from megappo.models.microbatch import MicroBatching
from megappo.models.pipeline_model import PipelineModel, Trainee
from megappo.models.shape import ModelShape
from megappo.parallel_state.groups import RoleGroups, create_role_groups
from megappo.pp_weights.buffer import WeightBuffer
from megappo.pp_weights.manager import WeightManager


class WeightPublisher:
    """The role `weights`: gathers the actor's parameters. On rank 0 `buffer` holds the version that was published last."""

    def __init__(self, manager: WeightManager) -> None:
        self.manager = manager
        self.buffer: WeightBuffer | None = None

    @dispatched(Dispatch.ALL)
    def publish(self, version: int, verify: bool) -> None:
        """Gather, normalise and pack the current weights as `version`; `verify` stamps a checksum on each tensor."""
        self.buffer = self.manager.publish(version, verify=verify)


class CheckpointWriter:
    """The role `checkpoint`: writes what is trained, every model with its own layout."""

    def __init__(self, models: Mapping[str, Savable]) -> None:
        self.models = models

    @dispatched(Dispatch.ALL)
    def save(self, folder: str, step: int) -> None:
        """Write `step_000100/{role}/` into the folder, and let `latest` name it."""
        save_step(folder, self.models, step)


class RankProcess:
    """The role `process`: what the system says of this rank."""

    @dispatched(Dispatch.ALL)
    def peak_memory_bytes(self) -> int:
        """Largest resident memory of this process so far."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class RankModels:
    """One rank's share of the run."""

    worker: ColocatedWorker
    publisher: WeightPublisher


def build_worker(plan: Plan, roles: Sequence[str]) -> RankModels:
    """The models of `roles` ("actor", "critic", "reference") on this rank. All ranks call it, in a torch world of theirs."""
    config = plan.config
    groups = create_role_groups({role: plan.layouts[role] for role in roles}, config.run.seed)
    dtype = config.model.dtype
    targets: dict[str, Any] = {}
    trained: dict[str, Savable] = {}

    chunks = _load(config.model.path, plan.shapes["actor"], groups["actor"], config.actor, dtype)
    actor_model = Trainee(chunks, groups["actor"], _batching(config.actor), config.actor.optimizer, "actor")
    trained["actor"] = Savable(chunks, groups["actor"], config.model.path)
    targets["actor"] = Actor(actor_model, config.rollout.temperature, config.algorithm.clip_range, config.actor.entropy_coef)

    if "critic" in roles:
        chunks = _load(str(config.critic.path), plan.shapes["critic"], groups["critic"], config.critic, dtype)
        model = Trainee(chunks, groups["critic"], _batching(config.critic), config.critic.optimizer, "critic")
        trained["critic"] = Savable(chunks, groups["critic"], str(config.critic.path))
        targets["critic"] = Critic(model, config.critic.value_clip_range)
    if "reference" in roles:
        chunks = _load(str(config.reference.path), plan.shapes["reference"], groups["reference"], config.reference, dtype)
        targets["reference"] = Policy(
            PipelineModel(chunks, groups["reference"], _batching(config.actor)), config.rollout.temperature
        )

    with groups["actor"].active():
        manager = WeightManager(
            actor_model.chunks,
            plan.shapes["actor"],
            groups["actor"],
            is_active=lambda: groups["actor"].is_active,
            transport=config.pp_weights.transport,
            gather=config.pp_weights.gather,
            alignment_bytes=config.pp_weights.alignment_bytes,
        )
    targets["weights"] = publisher = WeightPublisher(manager)
    targets["checkpoint"] = CheckpointWriter(trained)
    targets["process"] = RankProcess()
    groups["weights"] = groups["actor"]

    def activate(role: str) -> AbstractContextManager[None]:
        return groups[role].active() if role in groups else nullcontext()

    return RankModels(create_colocated_worker(targets, activate), publisher)


def _load(path: str, shape: ModelShape, groups: RoleGroups, section: Any, dtype: str) -> list[GPTChunk]:
    """This rank's chunks, filled from a Hugging Face folder or a checkpoint."""
    with groups.active():
        chunks = build_chunks(
            shape,
            groups,
            DTYPES[dtype],
            sequence_parallel=section.parallel.sequence_parallel,
            recompute=getattr(section, "recompute", False),
        )
    load_weights(path, chunks, groups)
    return chunks


def _batching(section: UpdateConfig) -> MicroBatching:
    return MicroBatching(size=section.micro_batch_size, tokens=section.micro_batch_tokens, packed=section.packed)
