"""Does off-loading free a GPU's memory, by way of page-locked host memory? Skipped without CUDA."""

from __future__ import annotations

import pytest
import torch

from megappo.pp_weights.offload import ModelMemory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def test_the_device_gives_the_memory_back_and_the_values_return() -> None:
    size = 64 << 20
    params = [torch.randn(size // 4, device="cuda") for _ in range(3)]
    grads = torch.ones(size // 4, device="cuda")
    want = [param.cpu() for param in params]
    memory = ModelMemory({"parameters": params, "gradients": [grads], "optimizer": []}.__getitem__)
    before, free_before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    moved = memory.offload("parameters", "gradients")
    assert (moved.to_host_bytes, moved.dropped_bytes) == (3 * size, size)
    assert before - torch.cuda.memory_allocated() >= 4 * size - (16 << 20)  # less the factors of the sums
    assert torch.cuda.mem_get_info()[0] - free_before >= 3 * size  # another process can have it
    copies = memory._copies["parameters"].values()
    assert all(piece.is_pinned() for copy in copies for piece in copy.pieces)
    memory.onload("parameters", "gradients")
    params[0].mul_(2)  # behind the copy, in the order of the stream
    assert torch.equal(params[0].cpu(), want[0] * 2)
    assert all(torch.equal(param.cpu(), value) for param, value in zip(params[1:], want[1:], strict=True))
    assert memory.offload("parameters").to_host_bytes == size
