"""Does every family compute what transformers computes, before and after a PPO update, however it is cut?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import bodies
from tests.distributed.test_parity import world
from tests.distributed.ways import Way
from tests.models import (
    FAMILIES,
    PLAIN_ADAM,
    make_batch,
    make_model_folder,
    transformers_log_probs,
    transformers_update,
    transformers_values,
)
from tests.pool import Pool

pytestmark = pytest.mark.distributed

BATCH = make_batch([5, 1, 9, 3], [7, 14, 1, 12])
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "pp2_vpp2": {"pp": 2, "vpp": 2},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_pp2_vpp2_sp": {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True},
}
WAYS = {"packed": Way(size=2), "padded": Way(size=2, packed=False)}
NEW = [family for family in FAMILIES if family != "llama"]  # that one is test_parity.py's
CASES = [(family, False) for family in NEW]
CASES += [pytest.param((family, True), marks=pytest.mark.long) for family in NEW if family != "attention_bias"]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(folder, what transformers says: log-probs and entropy before, gradient norm of the update, both after it)."""
    family, tied = request.param
    folder = make_model_folder(tmp_path_factory.mktemp(family), family, tied=tied)
    before = transformers_log_probs(folder, BATCH)
    model, grad_norm = transformers_update(folder, BATCH, PLAIN_ADAM)
    after = transformers_log_probs(folder, BATCH, model=model)
    return folder, (before, grad_norm, after)


LONG = ("tp2_sp", "pp2_vpp2")


@pytest.mark.parametrize("layout", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in LAYOUTS])
def test_log_probs_equal_transformers_before_and_after_an_update(pool: Pool, case: tuple[Path, Any], layout: str) -> None:
    folder, (want_before, want_norm, want_after) = case
    ways = WAYS if layout in ("one", "tp2_pp2") else {"packed": WAYS["packed"]}
    for way, how in ways.items():
        results = pool.run(
            world(LAYOUTS[layout]), bodies.log_probs_around_an_update, folder, LAYOUTS[layout], BATCH, how, PLAIN_ADAM
        )
        before, metrics, after = results[-1]
        assert metrics["grad_norm"] == pytest.approx(want_norm, rel=1e-4), way
        for got, want, when in ((before, want_before, "before"), (after, want_after, "after")):
            for name, expected in zip(("log_probs", "entropy"), want, strict=True):
                assert (got[name] - expected).abs().max().item() <= 1e-4, (way, when, name)


def test_the_update_is_large_enough_to_see(case: tuple[Path, Any]) -> None:
    _, ((before, _), _, (after, _)) = case
    assert (before - after).abs().max() > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_a_reward_model_equal_transformers(pool: Pool, tmp_path: Path, family: str) -> None:
    folder = make_model_folder(tmp_path, family, head="value")
    got = pool.run(4, bodies.values, folder, {"tp": 2, "pp": 2}, BATCH, Way(size=2))[-1]["values"]
    torch.testing.assert_close(got, transformers_values(folder, BATCH), atol=1e-4, rtol=0)
