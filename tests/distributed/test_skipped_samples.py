"""Does a sample that is skipped change nothing? Its row of the response mask is False; the rest is as if it were not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.config.schema_models import OptimizerConfig
from megappo.data.packing import BatchPlan
from tests.distributed import bodies
from tests.distributed.test_parity import joined, world
from tests.distributed.ways import Way
from tests.models import make_batch
from tests.pool import Pool

pytestmark = pytest.mark.distributed

LR = 1e-3
OPTIMIZER = OptimizerConfig(lr=LR, decay_steps=1, betas=(0.9, 0.95), clip_grad=1.0, eps=1e-7)
KEPT = [0, 1, 5]
ALL = make_batch([5, 1, 9, 3, 2, 4], [7, 4, 1, 6, 12, 2])
SKIPPING = {**ALL, "response_mask": ALL["response_mask"] & torch.tensor([i in KEPT for i in range(6)])[:, None]}
WITHOUT = {name: value[KEPT] for name, value in ALL.items()}

CASES: dict[str, tuple[dict[str, Any], Way]] = {
    "one": ({}, Way(size=2)),
    "a_micro_batch_of_skipped_samples": ({}, Way(size=1)),
    "padded": ({}, Way(size=2, packed=False)),
    "pp2_vpp2": ({"pp": 2, "vpp": 2}, Way(size=1)),
    "tp2_sequence_parallel": ({"tp": 2, "sequence_parallel": True}, Way(size=1)),
    "dp2": ({"dp": 2}, Way(size=2)),
    "dp2_pp2": ({"dp": 2, "pp": 2}, Way(size=1)),
}


def update(pool: Pool, folder: Path, layout: dict[str, Any], batch: dict[str, torch.Tensor], how: Way) -> Any:
    results = pool.run(world(layout), bodies.one_update, folder, layout, None, batch, how, OPTIMIZER)
    actor = next(r[0] for r in reversed(results) if "pg_loss" in r[0])
    critic = next(r[1] for r in reversed(results) if "vf_loss" in r[1])
    return actor, critic, {role: bodies.assemble([r[2][role] for r in results]) for role in ("actor", "critic")}


def computed(metrics: dict[str, float]) -> dict[str, float]:
    """What does not say how the batch was padded."""
    return {name: value for name, value in metrics.items() if name != "padding_share"}


@pytest.fixture(scope="module")
def without(pool: Pool, llama_folder: Path) -> Any:
    return update(pool, llama_folder, {}, WITHOUT, Way(size=2))


@pytest.mark.parametrize("case", CASES)
def test_an_update_equals_the_one_without_the_skipped_samples(pool: Pool, llama_folder: Path, without: Any, case: str) -> None:
    layout, how = CASES[case]
    actor, critic, parameters = update(pool, llama_folder, layout, SKIPPING, how)
    for got, want in ((actor, without[0]), (critic, without[1])):
        assert computed(got) == pytest.approx(computed(want), rel=1e-5, abs=1e-7)
    for role, tensors in parameters.items():
        for name, tensor in tensors.items():
            assert (tensor - without[2][role][name]).abs().max().item() <= 0.05 * LR, (role, name)


def test_a_rank_whose_samples_are_all_skipped_takes_part(pool: Pool, llama_folder: Path, without: Any) -> None:
    """The second of two data-parallel ranks gets samples 3, 4 and 5; here they are the skipped ones."""
    order = [0, 1, 5, 2, 3, 4]
    batch = {name: value[order] for name, value in SKIPPING.items()}
    assert not batch["response_mask"][3:].any()
    actor, critic, _ = update(
        pool, llama_folder, {"dp": 2}, batch, Way(plan=BatchPlan([0, 1, 2, 3, 4, 5], [3, 3], [0, 0, 1] * 2, 2))
    )
    assert computed(actor) == pytest.approx(computed(without[0]), rel=1e-5, abs=1e-7)
    assert computed(critic) == pytest.approx(computed(without[1]), rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("layout", [{}, {"dp": 2}, {"pp": 2, "vpp": 2}], ids=["one", "dp2", "pp2_vpp2"])
def test_log_probs_of_the_others_are_as_before_and_those_of_skipped_samples_0(
    pool: Pool, llama_folder: Path, layout: dict[str, Any]
) -> None:
    how = Way(size=1)
    results = pool.run(world(layout), bodies.log_probs, llama_folder, layout, SKIPPING, how)
    found = joined(layout, results, "log_probs")
    (want,) = pool.run(1, bodies.log_probs, llama_folder, {}, ALL, how)
    torch.testing.assert_close(found[KEPT], want["log_probs"][KEPT], atol=1e-5, rtol=0)
    assert found[[2, 3, 4]].abs().max() == 0
