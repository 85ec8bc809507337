"""Can an engine's fused weight be a view of what is published, and are the engine tests' shards those that are published?"""

from __future__ import annotations

import itertools

import pytest
import torch

from megappo.errors import RunFailed
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.plan import build_plan
from megappo.rollout.vllm_fill import side_by_side
from tests.buckets import worker_shard
from tests.fake_chunks import make_shape, stamped_hf


def test_tensors_without_a_gap_are_one_view() -> None:
    memory = torch.arange(32.0)
    tensors = {"q": memory[:12].view(4, 3), "k": memory[12:18].view(2, 3), "v": memory[18:24].view(2, 3), "norm": memory[24:]}
    fused = side_by_side(["q", "k", "v"], tensors)
    assert fused.shape == (8, 3) and fused.data_ptr() == memory.data_ptr()
    assert torch.equal(fused, torch.arange(24.0).view(8, 3))
    assert side_by_side(["norm"], tensors) is tensors["norm"]
    biases = side_by_side(["q", "k"], {"q": memory[4:8], "k": memory[8:10]})
    assert biases.tolist() == [4.0, 5.0, 6.0, 7.0, 8.0, 9.0]


@pytest.mark.parametrize("k", [torch.arange(32.0)[:6], torch.arange(32.0)[18:24], torch.zeros(6)])
def test_a_gap_another_order_or_other_memory_is_refused(k: torch.Tensor) -> None:
    memory = torch.arange(32.0)
    with pytest.raises(RunFailed, match="k does not follow q in the buffer without a gap"):
        side_by_side(["q", "k"], {"q": memory[:12].view(4, 3), "k": k.view(2, 3)})


def test_the_shards_that_the_engine_tests_cut_by_hand_have_the_plans_shapes() -> None:
    shape = make_shape()
    hf = stamped_hf(shape)
    dtypes = {name: tensor.dtype for name, tensor in hf.items()}
    plan = build_plan(shape, ParallelLayout(4, tp=2, pp=2), dtypes, gather="pp")
    for worker, target in enumerate(plan.targets):
        published = {entry.name: entry.shape for bucket in target.buckets for entry in bucket.entries}
        assert published == {name: tuple(tensor.shape) for name, tensor in worker_shard(hf, worker, 2).items()}


def test_what_is_published_lies_as_zero_copy_needs_it() -> None:
    """q, k, v and gate, up side by side, in vLLM's order."""
    shape = make_shape()
    dtypes = {name: tensor.dtype for name, tensor in stamped_hf(shape).items()}
    ((manifest,),) = (target.buckets for target in build_plan(shape, ParallelLayout(4, pp=2, vpp=2), dtypes).targets)
    ends = {entry.name: (entry.offset, entry.offset + entry.num_bytes) for entry in manifest.entries}
    for layer in range(4):
        for fused in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            names = [f"model.layers.{layer}.{part}.weight" for part in fused]
            assert all(ends[one][1] == ends[next_one][0] for one, next_one in itertools.pairwise(names))
