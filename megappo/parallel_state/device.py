"""Which device and which collective backend? CUDA with NCCL where there is a GPU, else the CPU with gloo."""

from __future__ import annotations

import importlib
import os
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


def has_cuda() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device of this rank's model."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_cuda() else torch.device("cpu")


def backend() -> str:
    """Backend of torch.distributed. With CUDA both are there: tensors on the host go over gloo."""
    return "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"


def import_megatron() -> None:
    """Import megatron-core, before anything of ours that imports it. Touches no device: the ranks may be forked afterwards.

    Megatron decorates small functions with torch.compile. A CPU build of torch imports a compiler for that, for seconds, and
    never compiles anything (see cpu_megatron): there the decorator is idle during the import."""
    # megatron-core warns at import, module by module, that apex and TransformerEngine are absent: here that is meant so.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    namespace: Any = torch
    compile_function = torch.compile
    if torch.version.cuda is None:
        namespace.compile = _without_compiling
    try:
        importlib.import_module("megatron.core.models.gpt")
        importlib.import_module("megatron.core.optimizer")
        importlib.import_module("megatron.core.pipeline_parallel")
        importlib.import_module("megatron.core.distributed")
    finally:
        namespace.compile = compile_function


def _without_compiling(function: Any = None, **_: object) -> Any:
    return function if function is not None else lambda function: function


def prepare_device() -> None:
    """Call once in each rank before a model is built: picks the GPU, or teaches megatron-core to live without one."""
    if has_cuda():
        torch.cuda.set_device(device())
        return
    # oneDNN's own default is 1024 compiled kernels, of more than 1 MB each in bfloat16: gigabytes a rank, over many steps.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "512")
    from megappo.parallel_state import cpu_megatron

    cpu_megatron.install()


def start_world(store: Store, rank: int, world_size: int) -> None:
    """This rank's device and torch's process group, over the rendezvous store. To be ended by `destroy_process_group`."""
    prepare_device()
    dist.init_process_group(
        backend(),
        store=dist.PrefixStore("torch", store),  # type: ignore[attr-defined]
        rank=rank,
        world_size=world_size,
        timeout=timedelta(hours=1),  # the watchdog ends a stuck run long before
    )
