"""What does a rank offer besides its models? The roles `weights`, `checkpoint`, `memory` and `process` that the driver calls."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

from megappo.checkpoint.save import Savable, save_step
from megappo.config.schema import OffloadConfig
from megappo.controller.dispatch import Dispatch, dispatched
from megappo.pp_weights.hf_writer import write_hf_folder
from megappo.pp_weights.manager import WeightManager
from megappo.pp_weights.offload import Kind, ModelMemory, Moved
from megappo.pp_weights.update import Receiver, Receivers


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
