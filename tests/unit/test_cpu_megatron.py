"""What answers megatron-core's CUDA calls on a CPU, and that it stays off where CUDA is."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megappo.parallel_state import cpu_megatron
from megappo.parallel_state.cpu_adam import FusedAdam


def test_it_is_off_where_cuda_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.cuda.current_device
    with pytest.raises(RuntimeError, match="on a machine with CUDA"):
        cpu_megatron.install()
    assert torch.cuda.current_device is before


def test_megatrons_cuda_calls_are_answered_on_the_cpu() -> None:
    code = """
import torch
from megappo.parallel_state.device import prepare_device
prepare_device(); prepare_device()
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random
assert torch.cuda.current_device() == torch.device("cpu")
assert schedules.torch.zeros([], device="cuda").device.type == "cpu"
assert schedules.torch.nn is torch.nn
assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
assert torch.zeros(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
assert torch.zeros(1).type(torch.int64).dtype == torch.int64
assert torch.zeros(1).cuda().device.type == "cpu"
tracker = random.get_cuda_rng_tracker()
random.initialize_rng_tracker()
tracker = random.get_cuda_rng_tracker()
tracker.add("a", 5)
outside = torch.get_rng_state()
with tracker.fork("a"): first = torch.rand(3)
assert torch.equal(torch.get_rng_state(), outside)
with tracker.fork("a"): second = torch.rand(3)
torch.manual_seed(5)
assert torch.equal(torch.rand(6), torch.cat((first, second)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("decoupled", [True, False])
def test_fused_adam_equals_torchs_adam(decoupled: bool) -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(7))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    settings = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    adam = FusedAdam(ours, adam_w_mode=decoupled, **settings)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **settings)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        adam.step()
        reference.step()
    assert adam.param_groups[0]["step"] == 5
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-6)
