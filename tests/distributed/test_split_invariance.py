"""Do 16 samples of mixed lengths give the same gradients and metrics however they are split over ranks and micro-batches?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megappo.config.schema_learning import AlgorithmConfig, ImportanceConfig
from megappo.data.packing import BatchPlan
from tests.distributed import bodies
from tests.distributed.test_parity import world
from tests.distributed.ways import Batch, Way
from tests.models import make_batch
from tests.pool import Pool

pytestmark = pytest.mark.distributed

ALGORITHMS = [
    AlgorithmConfig(loss_aggregation="token_mean", clip_range_high=0.3, dual_clip=1.5, kl_loss_coef=0.1),
    AlgorithmConfig(policy_loss="gspo", loss_aggregation="seq_mean_token_mean"),
    AlgorithmConfig(
        policy_loss="cispo",
        loss_aggregation="constant_length",
        loss_length=12,
        kl_loss="k2",
        kl_loss_coef=0.1,
        importance=ImportanceConfig(bound="truncated"),
    ),
    AlgorithmConfig(loss_aggregation="seq_mean_token_sum"),
]
PP2, PP2_VPP2 = {"pp": 2}, {"pp": 2, "vpp": 2}
SPLITS: dict[str, tuple[dict[str, Any], Way]] = {
    "micro_batches_of_1": ({}, Way(1)),
    "one_micro_batch_padded": ({}, Way(16, packed=False)),
    "tokens": ({}, Way(tokens=24)),
    "dp2": ({"dp": 2}, Way(4)),
    "dp2_tokens": ({"dp": 2}, Way(tokens=24)),
    "dp4": ({"dp": 4}, Way(3)),
    "tp2_padded": ({"tp": 2}, Way(5, packed=False)),
    "pp2_vpp2": (PP2_VPP2, Way(3)),
    "pp2_vpp2_tokens": (PP2_VPP2, Way(tokens=24)),
    "dp2_pp2_padded": (PP2 | {"dp": 2}, Way(3, packed=False)),
    "dp2_pp2_vpp2_tokens": (PP2_VPP2 | {"dp": 2}, Way(tokens=24)),
    "tp2_pp2_vpp2_tokens": (PP2_VPP2 | {"tp": 2}, Way(tokens=40)),
    "tp2_dp2_sp": ({"tp": 2, "dp": 2, "sequence_parallel": True}, Way(4)),
}


def made(prompts: list[int], responses: list[int]) -> Batch:
    batch = make_batch(prompts, responses)
    generator = torch.Generator().manual_seed(5)
    shape = batch["response_mask"].shape
    for name in ("old_log_probs", "ref_log_probs"):  # near those of the model, on both sides of the clip
        batch[name] = -4.1 + 0.6 * torch.randn(shape, generator=generator)
    batch["importance"] = 0.5 + torch.rand(shape, generator=generator)
    batch["response_mask"][0, 1:3] = False  # a span in the middle that does not count
    return batch


BATCH = made([5, 1, 9, 3, 2, 4, 6, 3, 1, 2, 8, 7, 2, 1, 5, 4], [7, 4, 1, 6, 12, 2, 3, 8, 1, 11, 9, 2, 5, 3, 12, 1])
SHORT_AND_LONG = made([1] + [9] * 9, [3] + [12] * 9)


def gradients(pool: Pool, folder: Path, layout: dict[str, Any], batch: Batch, way: Way) -> list[Any]:
    """For each algorithm (metrics, gradient by name)."""
    ranks = pool.run(world(layout), bodies.gradients, folder, layout, batch, way, ALGORITHMS)
    return [(ranks[-1][i][0], bodies.assemble([rank[i][1] for rank in ranks])) for i in range(len(ALGORITHMS))]


def assert_same(got: list[Any], want: list[Any]) -> None:
    for (metrics, tensors), (want_metrics, want_tensors) in zip(got, want, strict=True):
        assert metrics.keys() == want_metrics.keys()
        for name in metrics.keys() - {"padding_share"}:
            assert metrics[name] == pytest.approx(want_metrics[name], rel=2e-5, abs=1e-7), name
        for name, tensor in tensors.items():
            assert ((tensor - want_tensors[name]).norm() / want_tensors[name].norm()).item() <= 2e-5, name


@pytest.fixture(scope="module")
def together(pool: Pool, llama_folder: Path) -> list[Any]:
    """One rank, one packed micro-batch."""
    return gradients(pool, llama_folder, {}, BATCH, Way(16))


@pytest.mark.parametrize("split", SPLITS)
def test_gradients_and_metrics_do_not_depend_on_the_split(
    pool: Pool, llama_folder: Path, together: list[Any], split: str
) -> None:
    layout, way = SPLITS[split]
    assert_same(gradients(pool, llama_folder, layout, BATCH, way), together)


def independent_loss(kind: int, log_p: Tensor, entropy: Tensor, old: Tensor, ref: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
    """Sum over the valid tokens of one response of what ALGORITHMS[kind] minimises, from the papers' formulas."""
    ratio, d = (log_p - old).exp(), log_p - ref
    if kind == 0:
        loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(0.8, 1.3))
        loss = torch.where(gain < 0, torch.minimum(loss, -1.5 * gain), loss) + 0.1 * ((-d).exp() - 1 + d)
    elif kind == 1:
        whole = (log_p - old).mean().exp().detach() * (log_p - log_p.detach()).exp()
        loss = torch.maximum(-gain * whole, -gain * whole.clamp(0.8, 1.2))
    elif kind == 2:
        loss = -ratio.clamp(0.8, 1.2).detach() * gain * log_p * weight + 0.1 * d.square() / 2
    else:
        loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(0.8, 1.2))
    loss = loss - 0.01 * entropy
    return loss.mean() if kind == 1 else loss.sum()


@pytest.mark.parametrize("kind", range(len(ALGORITHMS)))
def test_each_algorithm_equals_plain_autograd_on_transformers(llama_folder: Path, together: list[Any], kind: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_folder, dtype=torch.float64)
    mask, samples = BATCH["response_mask"], len(BATCH["response_mask"])
    divisor = [int(mask.sum()), samples, samples * 12, samples][kind]
    total = torch.zeros((), dtype=torch.float64)
    for i in range(samples):
        there = BATCH["attention_mask"][i]
        ids, num_responses = BATCH["input_ids"][i][there], int(there[-mask.shape[1] :].sum())
        log_p = model(ids[None]).logits[0, -num_responses - 1 : -1].log_softmax(-1)
        valid = mask[i, :num_responses]
        names = ("old_log_probs", "ref_log_probs", "advantages", "importance")
        columns = [BATCH[name][i, :num_responses][valid].double() for name in names]
        chosen = log_p.gather(1, ids[-num_responses:, None]).squeeze(1)
        total = total + independent_loss(kind, chosen[valid], -(log_p.exp() * log_p).sum(-1)[valid], *columns)
    (total / divisor).backward()
    metrics, tensors = together[kind]
    assert metrics["loss"] == pytest.approx(total.item() / divisor, rel=1e-5)
    for name, parameter in model.named_parameters():
        assert ((tensors[name] - parameter.grad).norm() / parameter.grad.norm()).item() <= 1e-4, name


def test_the_algorithms_differ(together: list[Any]) -> None:
    """Else the table above would show less than it says."""
    norms = [metrics["grad_norm"] for metrics, _ in together]
    assert all(abs(a - b) > 0.01 * a for i, a in enumerate(norms) for b in norms[i + 1 :]), norms
    assert together[0][0]["dual_clipfrac"] > 0 and together[0][0]["clipfrac"] > 0
    assert together[0][0]["padding_share"] == 0


@pytest.mark.parametrize("way", ["all_long_ones_on_one_rank", "as_planned"])
def test_one_short_sample_against_nine_long_ones(pool: Pool, llama_folder: Path, way: str) -> None:
    """Over dp2 with an interleaved schedule: nine stand-ins run beside nine long samples, and count nowhere."""
    apart = BatchPlan(list(range(10)), [1, 9], [0, *range(9)], 10)
    how = Way(plan=apart) if way == "all_long_ones_on_one_rank" else Way(tokens=21)
    got = gradients(pool, llama_folder, {"dp": 2, **PP2_VPP2}, SHORT_AND_LONG, how)
    assert_same(got, gradients(pool, llama_folder, {}, SHORT_AND_LONG, Way(10)))
    assert got[0][0]["padding_share"] > 0
