"""How did verl 0.1 bring the stages together? `AllGatherPPModel`: every rank gets its tp shard of all stages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from benchmarks.peers import use_source
from benchmarks.weights_model import DTYPE
from megappo.models.gpt import build_chunks
from megappo.models.shape import ModelShape


def load() -> None:
    use_source("verl01", "verl")
    engines: Any = ModuleType("verl.third_party.vllm")  # its own refuses every vLLM of the last years; not used here
    engines.LLM = engines.LLMEngine = engines.parallel_state = None
    sys.modules["verl.third_party.vllm"] = engines
    from verl.trainer.ppo.hybrid_engine import megatron_vllm

    if megatron_vllm.AllGatherPPModel.__module__ != megatron_vllm.__name__:
        raise ImportError("verl 0.1 has no AllGatherPPModel here")
    build = megatron_vllm.get_model
    # Its DDP wrapper has the signature of another megatron-core. It plays no part in the exchange.
    megatron_vllm.get_model = lambda provider, wrap_with_ddp=True: build(provider, wrap_with_ddp=False)


def version() -> str:
    import verl

    return str(verl.__version__)


def gather_stages(shape: ModelShape, groups: Any) -> tuple[list[torch.nn.Module], Callable[[], object], Callable[[], Any]]:
    """(this rank's own chunks, what gathers all stages, what then gives [stage][chunk]{name: parameter}).

    Called inside `groups.active()`, as are its results."""
    from megatron.core import mpu
    from verl.trainer.ppo.hybrid_engine.megatron_vllm import AllGatherPPModel

    built: dict[int, list[Any]] = {}

    def provide(pre_process: bool, post_process: bool) -> torch.nn.Module:
        """One chunk of the stage that AllGatherPPModel has set megatron to."""
        stage = mpu.get_pipeline_model_parallel_rank()
        if stage not in built:
            place = SimpleNamespace(layout=groups.layout, coordinates=SimpleNamespace(pp=stage), is_active=True)
            built[stage] = build_chunks(shape, place, DTYPE)
        chunk: torch.nn.Module = built[stage][mpu.get_virtual_pipeline_model_parallel_rank()]
        return chunk

    with _CudaMeansCpu():
        model = AllGatherPPModel(provide)
    return built[groups.coordinates.pp], model.allgather_params, model.get_all_params


class _CudaMeansCpu(TorchFunctionMode):
    """device="cuda" in a factory call means the CPU. Left before anything is timed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)
