"""What lives on one rank? `build_worker`: the models of every role, filled from their folders, behind one colocated worker."""

from __future__ import annotations

import functools
import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from megappo.actor.actor import Actor, Policy
from megappo.checkpoint.load import load_weights
from megappo.checkpoint.save import Savable, save_step
from megappo.config.check import Plan
from megappo.config.schema import OffloadConfig, UpdateConfig
from megappo.controller.colocate import ColocatedWorker, create_colocated_worker
from megappo.controller.dispatch import Dispatch, dispatched
from megappo.critic.critic import Critic
from megappo.models.gpt import DTYPES, GPTChunk, build_chunks
from megappo.models.microbatch import MicroBatching
from megappo.models.pipeline_model import PipelineModel, Trainee
from megappo.models.shape import ModelShape
from megappo.parallel_state.groups import RoleGroups, create_role_groups
from megappo.pp_weights.hf_writer import write_hf_folder
from megappo.pp_weights.manager import WeightManager
from megappo.pp_weights.offload import Kind, ModelMemory, Moved
from megappo.pp_weights.update import Receiver, Receivers
from megappo.rollout.engine import RolloutEngine
from megappo.rollout.group import EngineOnRank


class WeightPublisher:
    """The role `weights`: gathers the actor's parameters and hands them to `receivers`, the engines of this rank.

    `around` is entered for the length of each update. make_exporter: a manager that gathers complete tensors in buckets, for
    files."""

    def __init__(self, manager: WeightManager, make_exporter: Callable[[], WeightManager], memory: ModelMemory) -> None:
        self.manager = manager
        self.receivers: list[Receiver] = []
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self._make_exporter = make_exporter
        self._memory = memory

    @dispatched(Dispatch.ALL)
    def publish(self, version: int, verify: bool) -> dict[str, float]:
        """Gather, normalise, pack and hand over the current weights as `version`; with `verify` the receivers compare checksums.
        Returns this rank's seconds in each part, and the bytes of the model, as metrics."""
        self._memory.onload("parameters")
        with self.around():
            self.manager.publish(version, verify=verify, receiver=Receivers(self.receivers))
        stats = self.manager.stats
        return {
            "timing_s/publish_copy": stats.copy_s,
            "timing_s/publish_exchange": stats.exchange_s,
            "timing_s/publish_verify": stats.verify_s,
            "timing_s/publish_load": stats.load_s,
            "weights/bytes": self.manager.plan.model_bytes,
        }

    @dispatched(Dispatch.ALL)
    def export(self, folder: str, config_from: str) -> None:
        """Write the current weights as a Hugging Face folder, on rank 0; config and tokenizer come from `config_from`."""
        self._memory.onload("parameters")
        manager = self._make_exporter()
        try:
            tensors = manager.iterate(version=0)
            if manager.is_receiver:
                dtypes = {name: getattr(torch, dtype) for name, (dtype, _) in manager.table.items()}
                received = ((name, tensor) for name, tensor in tensors if tensor is not None)
                write_hf_folder(folder, received, dtypes, config_from=config_from)
            else:
                for _ in tensors:
                    pass  # this rank only sends
        finally:
            manager.close()


class CheckpointWriter:
    """The role `checkpoint`: writes what is trained, every model with its own layout."""

    def __init__(self, models: Mapping[str, Savable], memories: Mapping[str, ModelMemory]) -> None:
        self.models = models
        self.memories = memories

    @dispatched(Dispatch.ALL)
    def save(self, folder: str, step: int) -> None:
        """Write `step_000100/{role}/` into the folder, and let `latest` name it."""
        with ExitStack() as stack:
            for role in self.models:
                stack.enter_context(self.memories[role].held("parameters"))
            save_step(folder, self.models, step)


class MemoryKeeper:
    """The role `memory`: makes room on the device while the engine generates. What is away comes back where it is used."""

    def __init__(self, memories: Mapping[str, ModelMemory], config: OffloadConfig) -> None:
        self.memories = memories
        wanted: dict[Kind, bool] = {
            "parameters": config.parameters,
            "gradients": config.gradients,
            "optimizer": config.optimizer,
        }
        self.kinds = [kind for kind, leaves in wanted.items() if leaves]

    @dispatched(Dispatch.ALL)
    def offload(self) -> dict[str, float]:
        """Take off this rank's device what the config names, of every model. Returns the metrics of it, and of what came back
        since the call before (for a save, too); nothing where nothing is named."""
        if not self.kinds:
            return {}
        left, since = Moved(), Moved()
        for memory in self.memories.values():
            left += memory.offload(*self.kinds)
            since += memory.moved
            memory.moved = Moved()
        return {
            "memory/offloaded_bytes": left.offloaded_bytes,
            "memory/to_host_bytes": left.to_host_bytes,
            "memory/to_device_bytes": since.to_device_bytes,
            "timing_s/offload": left.offload_s,
            "timing_s/onload": since.onload_s,
        }


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


def build_worker(plan: Plan, roles: Sequence[str], engine: RolloutEngine | None = None) -> RankModels:
    """The models of `roles` ("actor", "critic", "reference") on this rank, and its engine. All ranks call it, in a torch world of
    theirs."""
    config = plan.config
    groups = create_role_groups({role: plan.layouts[role] for role in roles}, config.run.seed)
    dtype = config.model.dtype
    targets: dict[str, Any] = {}
    trained: dict[str, Savable] = {}
    memories: dict[str, ModelMemory] = {}

    chunks = _load(config.model.path, plan.shapes["actor"], groups["actor"], config.actor, dtype)
    actor_model = Trainee(chunks, groups["actor"], _batching(config.actor), config.actor.optimizer, "actor")
    memories["actor"] = _memory_of(actor_model)
    trained["actor"] = Savable(chunks, groups["actor"], config.model.path)
    targets["actor"] = Actor(actor_model, config.rollout.temperature, config.algorithm.clip_range, config.actor.entropy_coef)

    if "critic" in roles:
        chunks = _load(str(config.critic.path), plan.shapes["critic"], groups["critic"], config.critic, dtype)
        model = Trainee(chunks, groups["critic"], _batching(config.critic), config.critic.optimizer, "critic")
        memories["critic"] = _memory_of(model)
        trained["critic"] = Savable(chunks, groups["critic"], str(config.critic.path))
        targets["critic"] = Critic(model, config.critic.value_clip_range)
    if "reference" in roles:
        chunks = _load(str(config.reference.path), plan.shapes["reference"], groups["reference"], config.reference, dtype)
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


def _memory_of(model: PipelineModel) -> ModelMemory:
    """The model's memory, brought back by whatever uses the model."""
    memory = ModelMemory(model.tensors)
    model.onload = memory.onload
    return memory


def _batching(section: UpdateConfig) -> MicroBatching:
    return MicroBatching(size=section.micro_batch_size, tokens=section.micro_batch_tokens, packed=section.packed)
