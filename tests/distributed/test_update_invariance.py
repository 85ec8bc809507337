"""Does one PPO update give the same parameters however the model and the batch are cut? Compared with the one-process run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.config.schema_models import OptimizerConfig
from tests.distributed import bodies
from tests.distributed.test_parity import world
from tests.distributed.ways import Way
from tests.models import make_batch
from tests.pool import Pool

pytestmark = pytest.mark.distributed

LR = 1e-3
# eps above the rounding error of a gradient: below it Adam's first step turns rounding into whole learning rates.
OPTIMIZER = OptimizerConfig(lr=LR, decay_steps=1, betas=(0.9, 0.95), clip_grad=1.0, eps=1e-7)
DISTRIBUTED = replace(OPTIMIZER, distributed=True)
HOW = Way(size=2)
BATCH = make_batch([5, 1, 9, 3, 2, 4, 6, 3], [7, 4, 1, 6, 12, 2, 3, 8])

Case = tuple[dict[str, Any], dict[str, Any] | None, Way, OptimizerConfig]
CASES: dict[str, Case] = {
    "pp2": ({"pp": 2}, None, HOW, OPTIMIZER),
    "pp2_vpp2": ({"pp": 2, "vpp": 2}, None, HOW, OPTIMIZER),
    "tp2_pp2": ({"tp": 2, "pp": 2}, None, HOW, OPTIMIZER),
    "tp2_pp2_vpp2": ({"tp": 2, "pp": 2, "vpp": 2}, None, HOW, OPTIMIZER),
    "tp2_pp2_vpp2_sp": ({"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True}, None, HOW, OPTIMIZER),
    "dp2_pp2_distributed": ({"dp": 2, "pp": 2}, None, HOW, DISTRIBUTED),
    "tp2_pp2_from_hidden_states": ({"tp": 2, "pp": 2, "log_probs_from": "hidden_states"}, None, HOW, OPTIMIZER),
    "pp3_ends_count": (
        {"pp": 3, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
        None,
        HOW,
        OPTIMIZER,
    ),
    "pp2_vpp2_ends_alone": ({"pp": 2, "vpp": 2, "pipeline_model_parallel_layout": "E|tt|tt|L"}, None, HOW, OPTIMIZER),
    "pp3_empty_stage_distributed": ({"pp": 3, "pipeline_model_parallel_layout": "Ettt||tL"}, None, HOW, DISTRIBUTED),
    "actor_pp2_vpp2_critic_tp2": ({"pp": 2, "vpp": 2}, {"tp": 2}, HOW, OPTIMIZER),
    "micro_batch_1": ({}, None, Way(size=1), OPTIMIZER),
    "micro_batch_4": ({}, None, Way(size=4), OPTIMIZER),
    "micro_batch_3_pp2_vpp2": ({"pp": 2, "vpp": 2}, None, Way(size=3), OPTIMIZER),
    "padded": ({"pp": 2}, None, Way(size=4, packed=False), OPTIMIZER),
    "token_budget": ({"pp": 2, "vpp": 2}, None, Way(size=1, tokens=30), OPTIMIZER),
}


def run(pool: Pool, folder: Path, case: Case, steps: int = 1) -> tuple[dict[str, float], dict[str, float], dict[str, Any]]:
    layout, critic_layout, how, optimizer = case
    results = pool.run(world(layout), bodies.one_update, folder, layout, critic_layout, BATCH, how, optimizer, steps)
    actor = next(r[0] for r in reversed(results) if "pg_loss" in r[0])
    critic = next(r[1] for r in reversed(results) if "vf_loss" in r[1])
    return actor, critic, {role: bodies.assemble([r[2][role] for r in results]) for role in ("actor", "critic")}


@pytest.fixture(scope="module")
def references(pool: Pool, llama_folder: Path, tied_llama_folder: Path) -> dict[bool, Any]:
    alone: Case = ({}, None, HOW, OPTIMIZER)
    return {tied: run(pool, folder, alone) for tied, folder in ((False, llama_folder), (True, tied_llama_folder))}


TIED = ("pp2", "tp2_pp2_vpp2_sp", "dp2_pp2_distributed", "pp2_vpp2_ends_alone", "actor_pp2_vpp2_critic_tp2")
"""The cases that are run with tied embeddings as well; the others are long."""
WAYS = [(case, False) for case in CASES] + [(case, True) for case in TIED]
WAYS += [pytest.param(case, True, marks=pytest.mark.long) for case in CASES if case not in TIED]


@pytest.mark.parametrize("case, tied", WAYS)
def test_one_update_equals_the_one_process_update(
    pool: Pool, llama_folder: Path, tied_llama_folder: Path, references: dict[bool, Any], case: str, tied: bool
) -> None:
    assert_same_update(run(pool, tied_llama_folder if tied else llama_folder, CASES[case]), references[tied])


def assert_same_update(got: Any, want: Any) -> None:
    """Two results of `run`."""
    actor, critic, parameters = got
    want_actor, want_critic, want_parameters = want
    for metrics, want_metrics in ((actor, want_actor), (critic, want_critic)):
        for name in ("loss", "grad_norm"):
            assert metrics[name] == pytest.approx(want_metrics[name], rel=1e-5), name
    for role, tensors in parameters.items():
        assert tensors.keys() == want_parameters[role].keys()
        for name, tensor in tensors.items():
            wanted = want_parameters[role][name]
            assert ((tensor - wanted).norm() / wanted.norm().clamp(min=LR)).item() <= 1e-5, (role, name)
            assert (tensor - wanted).abs().max().item() <= 0.05 * LR, (role, name)


def test_the_update_moves_every_parameter(references: dict[bool, Any], llama_folder: Path) -> None:
    from safetensors.torch import load_file

    before = load_file(llama_folder / "model.safetensors")
    _, _, parameters = references[False]
    assert parameters["actor"].keys() == before.keys()
    for name, tensor in parameters["actor"].items():
        assert not torch.equal(tensor, before[name]), name
