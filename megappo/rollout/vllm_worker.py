"""What can vLLM's workers be asked? `WorkerExtension`, which vLLM adds to its worker class; it runs where the model lies."""

from __future__ import annotations

import multiprocessing
import os
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from megappo.lifeline import die_with_parent
from megappo.pp_weights.update import unpack_update
from megappo.rollout.vllm_fill import AliasFiller, Filler, ReloadFiller
from megappo.rollout.vllm_intake import Intake
from megappo.rollout.vllm_layers import full_shapes

WORKER_EXTENSION = "megappo.rollout.vllm_worker.WorkerExtension"
SHARED_MEMORY = Path("/dev/shm")

# vLLM's bfloat16 attention uses AMX tiles where the CPU has them, and Linux ends a process that has not asked for them (SIGILL).
# Asked at import: vLLM's workers (tp > 1) import this file before their first forward pass and can be called only after it.
torch.cpu._init_amx()


def offers_weight_transfer() -> bool:
    """Whether this vLLM has the weight-transfer API that `vllm_transfer` is written to; else `reload_weights` serves."""
    if find_spec("vllm.distributed.weight_transfer") is None:
        return False
    from vllm import LLM
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    calls = (
        "init_weight_transfer_engine",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "update_weight_version",
    )
    own = ("start_weight_update", "receive_weights", "finish_weight_update")
    return all(hasattr(LLM, name) for name in calls) and all(hasattr(WeightTransferEngine, name) for name in own)


if offers_weight_transfer():  # in each worker, before vLLM makes its transfer engine
    from megappo.rollout.vllm_transfer import register

    register()


class WorkerExtension:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`)."""

    def megappo_die_with_parent(self) -> None:
        """vLLM's workers must not outlive the engine's child. With tp=1 the worker is the child itself, bound already."""
        if multiprocessing.parent_process() is not None:
            die_with_parent(os.getppid())

    def megappo_mapped_shared_memory(self) -> list[str]:
        return mapped_shared_memory()

    def megappo_expected_weights(self) -> dict[str, tuple[int, ...]]:
        return full_shapes(self.model_runner.get_model())  # type: ignore[attr-defined]

    def megappo_outcome(self) -> tuple[str | None, int]:
        """Of the update under way, or the last: what went wrong, and the bytes copied only because vLLM held on to them."""
        return self._megappo_intake.failure, self._megappo_intake.cloned_bytes

    def megappo_abandon(self) -> None:
        self._megappo_intake.abandon()

    def megappo_clear_kv_cache(self) -> None:
        """Fill the KV cache with zeros. Attention on a CPU reads the whole last block and weighs what is not written yet with 0:
        one NaN that broken weights left there would make each later answer NaN, too."""
        for cache in self.model_runner.kv_caches:  # type: ignore[attr-defined]
            cache.zero_()

    @property
    def _megappo_intake(self) -> Intake:
        transfer: Any = getattr(self, "weight_transfer_engine", None)
        intake: Intake = transfer.intake if transfer is not None else self._megappo_reload_intake
        return intake

    # An update where vLLM has no weight-transfer API.

    def megappo_start(self, update: dict[str, Any], zero_copy: bool) -> None:
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        filler: Filler = AliasFiller(runner.get_model()) if zero_copy else ReloadFiller(runner)
        self._megappo_intake.start(unpack_update(update), filler)

    def megappo_take(self, path: str, manifest: str) -> None:
        self._megappo_intake.take(path, manifest)

    def megappo_finish(self) -> None:
        self._megappo_intake.finish()

    @cached_property
    def _megappo_reload_intake(self) -> Intake:
        runner: Any = self.model_runner  # type: ignore[attr-defined]
        rank: int = self.rank  # type: ignore[attr-defined]
        return Intake(runner.get_model(), rank)


def mapped_shared_memory() -> list[str]:
    """Names under /dev/shm that this process has mapped and that still exist."""
    prefix = f"{SHARED_MEMORY}/"
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    names = {line.partition(prefix)[2] for line in lines if prefix in line}
    return sorted(name for name in names if (SHARED_MEMORY / name).exists())
