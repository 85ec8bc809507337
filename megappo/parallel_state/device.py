"""Which device and which collective backend? CUDA with NCCL where there is a GPU, else the CPU with gloo."""

from __future__ import annotations

import os

import torch


def has_cuda() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device of this rank's model."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if has_cuda() else torch.device("cpu")


def backend() -> str:
    """Backend of torch.distributed. With CUDA both are there: tensors on the host go over gloo."""
    return "cpu:gloo,cuda:nccl" if has_cuda() else "gloo"


def prepare_device() -> None:
    """Call once in each rank before any megatron import: picks the GPU, or teaches megatron-core to live without one."""
    if has_cuda():
        torch.cuda.set_device(device())
        return
    from megappo.parallel_state import cpu_megatron

    cpu_megatron.install()
