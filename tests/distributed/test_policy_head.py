"""Do log-probs from hidden states equal those from logits, and the updates that follow, without the logits ever being there?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megappo.config.schema_models import OptimizerConfig
from megappo.models import hidden_log_probs
from megappo.models.microbatch import MicroBatch
from megappo.models.pipeline_model import LossSums, Trainee
from megappo.models.policy_head import PolicyHead
from megappo.parallel_state.groups import create_role_groups
from tests.distributed import bodies
from tests.distributed.ways import Way
from tests.models import make_batch, make_llama_folder, transformers_log_probs
from tests.pool import Pool

pytestmark = pytest.mark.distributed

TEMPERATURE = 0.7
# eps above the rounding error of a gradient: below it Adam's first step turns rounding into whole learning rates.
OPTIMIZER = OptimizerConfig(lr=1e-3, decay_steps=1, betas=(0.9, 0.95), clip_grad=1.0, eps=1e-7)
HIDDEN_STATES = {"log_probs_from": "hidden_states"}
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "one_tied": ({}, True),
    "tp2_sp": ({"tp": 2, "sequence_parallel": True}, False),
    "pp2_vpp2_tied": ({"pp": 2, "vpp": 2}, True),
    "tp2_pp2": ({"tp": 2, "pp": 2}, False),
    "tp2_pp2_sp_tied": ({"tp": 2, "pp": 2, "sequence_parallel": True}, True),
}


class Sizes(TorchDispatchMode):
    """Sees what every operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [x.untyped_storage().nbytes() for x in tree_leaves(result) if isinstance(x, Tensor)]
        self.largest = max([self.largest, *sizes])
        return result


def scores_and_update(
    folder: Path, layout: dict[str, Any], batch: dict[str, Tensor], num_micro_batches: int, dtype: str = "float32"
) -> Any:
    """(scores, metrics of one update, pieces of this rank, largest storage that any operation returned)"""
    groups = create_role_groups({"actor": bodies.layout_for(folder, layout)}, seed=1)["actor"]
    chunks = bodies.load_model(folder, groups, layout, dtype=dtype)
    model = Trainee(chunks, groups, Way().batching, OPTIMIZER, "actor")
    head = PolicyHead(model, TEMPERATURE)

    def score(output: Tensor, micro_batch: MicroBatch) -> dict[str, Tensor]:
        log_probs, entropy = head.log_probs_and_entropy(output, micro_batch.labels)
        return {"log_probs": log_probs, "entropy": entropy, "alone": head.log_probs(output, micro_batch.labels)}

    def loss(output: Tensor, micro_batch: MicroBatch) -> LossSums:
        log_probs, entropy = head.log_probs_and_entropy(output, micro_batch.labels)
        gains = micro_batch.fields["advantages"] * log_probs + 0.1 * entropy
        return LossSums(-(gains * micro_batch.mask).sum(), micro_batch.mask.sum(), {}, {})

    with Sizes() as sizes:
        scores = model.score(batch, num_micro_batches, score)
        metrics = model.update(batch, num_micro_batches, ("advantages",), loss, 1)
    return scores, metrics, bodies.exported_pieces(model), sizes.largest


def numbered(batch: dict[str, Tensor], size: int) -> dict[str, Tensor]:
    return {**batch, "micro_batch": torch.arange(len(batch["input_ids"])) // size}


BATCH = numbered(make_batch([5, 1, 9, 3, 2, 4, 6, 3], [7, 4, 1, 6, 12, 2, 3, 8]), 2)


@pytest.fixture(scope="module")
def from_logits(pool: Pool, llama_folder: Path, tied_llama_folder: Path) -> dict[bool, Any]:
    """What one process finds, untied and tied."""
    folders = {False: llama_folder, True: tied_llama_folder}
    return {tied: pool.run(1, scores_and_update, folder, {}, BATCH, 4)[0] for tied, folder in folders.items()}


@pytest.mark.parametrize("case", CASES)
def test_scores_and_one_update_equal_those_from_logits(
    pool: Pool, llama_folder: Path, tied_llama_folder: Path, from_logits: dict[bool, Any], case: str
) -> None:
    layout, tied = CASES[case]
    folder = tied_llama_folder if tied else llama_folder
    _, want_metrics, want_pieces, _ = from_logits[tied]
    found = pool.run(bodies.layout_for(folder, layout).world_size, scores_and_update, folder, layout | HIDDEN_STATES, BATCH, 4)

    want, want_entropy = transformers_log_probs(folder, BATCH, TEMPERATURE)
    scores, metrics, _, _ = found[-1]
    torch.testing.assert_close(scores["log_probs"], want, atol=1e-4, rtol=0)
    torch.testing.assert_close(scores["entropy"], want_entropy, atol=1e-4, rtol=0)
    torch.testing.assert_close(scores["alone"], scores["log_probs"], atol=1e-6, rtol=0)
    for name in ("loss", "grad_norm"):
        assert metrics[name] == pytest.approx(want_metrics[name], rel=1e-5), name
    tensors = bodies.assemble([rank[2] for rank in found])
    for name, wanted in bodies.assemble([want_pieces]).items():
        assert ((tensors[name] - wanted).norm() / wanted.norm().clamp(min=OPTIMIZER.lr)).item() <= 1e-5, name


def test_in_bfloat16_both_ways_agree_to_its_precision(pool: Pool, llama_folder: Path) -> None:
    layout = {"tp": 2, "sequence_parallel": True}
    runs = [pool.run(2, scores_and_update, llama_folder, layout | way, BATCH, 4, "bfloat16") for way in ({}, HIDDEN_STATES)]
    (want, want_metrics, _, _), (got, metrics, _, _) = runs[0][-1], runs[1][-1]
    torch.testing.assert_close(got["log_probs"], want["log_probs"], atol=0.05, rtol=0)
    for name in ("loss", "grad_norm"):
        assert metrics[name] == pytest.approx(want_metrics[name], rel=0.01), name


def with_small_tiles(*args: Any) -> int:
    """scores_and_update's largest storage, where tiles are small beside this test's logits."""
    rows, elements = hidden_log_probs._TILE_ROWS["cpu"], hidden_log_probs._TILE_ELEMENTS["cpu"]
    hidden_log_probs._TILE_ROWS["cpu"], hidden_log_probs._TILE_ELEMENTS["cpu"] = 64, 64 * 256
    try:
        return int(scores_and_update(*args)[3])
    finally:
        hidden_log_probs._TILE_ROWS["cpu"], hidden_log_probs._TILE_ELEMENTS["cpu"] = rows, elements


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "sequence_parallel": True}], ids=["one", "tp2_sp"])
def test_logits_never_exist_where_log_probs_come_from_hidden_states(pool: Pool, tmp_path: Path, layout: dict[str, Any]) -> None:
    folder = make_llama_folder(tmp_path, tied=False, vocab_size=1003)
    batch = numbered(make_batch([4] * 16, [30] * 16, vocab_size=1003), 16)
    logits_bytes = 16 * 30 * 1024 // bodies.layout_for(folder, layout).world_size * 4
    assert min(pool.run(bodies.layout_for(folder, layout).world_size, with_small_tiles, folder, layout, batch, 1)) >= logits_bytes
    assert (
        max(pool.run(bodies.layout_for(folder, layout).world_size, with_small_tiles, folder, layout | HIDDEN_STATES, batch, 1))
        < logits_bytes
    )


def test_logits_are_handed_over_for_their_gradient() -> None:
    model: Any = SimpleNamespace(
        groups=SimpleNamespace(coordinates=SimpleNamespace(tp=0), layout=SimpleNamespace(tp=1)),
        shape=SimpleNamespace(vocab_size=61),
        chunks=[SimpleNamespace(log_probs_from="logits")],
    )
    head, labels = PolicyHead(model, TEMPERATURE), torch.arange(9)
    for results_of in (head.log_probs, lambda *given: sum(head.log_probs_and_entropy(*given))):
        leaf = torch.randn(9, 64, requires_grad=True)
        logits = leaf * 2
        results_of(logits, labels).sum().backward()  # type: ignore[union-attr]
        assert leaf.grad is not None and leaf.grad.any()
        assert torch.equal(logits.detach() * 2, leaf.grad)
