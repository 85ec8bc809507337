"""What does a step leave behind that must not happen? Not finite, or without a valid token: nothing, on any rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megappo.actor.actor import Actor
from megappo.config.schema_learning import AlgorithmConfig
from megappo.config.schema_models import OptimizerConfig
from megappo.models.microbatch import MicroBatch
from megappo.models.pipeline_model import LossSums, Trainee
from megappo.parallel_state.groups import create_role_groups
from tests.distributed import bodies
from tests.distributed.test_parity import world
from tests.distributed.ways import Batch, Way
from tests.models import make_batch
from tests.pool import Pool

pytestmark = pytest.mark.distributed

BATCH = make_batch([5, 1, 9, 3], [7, 4, 1, 6])
OPTIMIZER = OptimizerConfig(lr=1e-2, warmup_steps=4, decay="cosine", decay_steps=10, min_lr_ratio=0.1, betas=(0.9, 0.95))
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2_distributed": {"dp": 2},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "pp2_vpp2": {"pp": 2, "vpp": 2},
}


def bad(kind: str) -> Batch:
    """One sample of the batch, on one data-parallel rank, is bad."""
    batch = {name: value.clone() for name, value in BATCH.items()}
    if kind == "nan":
        batch["old_log_probs"][2, 0] = torch.nan
    elif kind == "inf":
        batch["advantages"][1, 0] = torch.inf
    elif kind == "no valid token":
        batch["response_mask"][:] = False
    return batch


def state(model: Trainee) -> list[Tensor]:
    """Weights, optimizer state, steps and learning rates, as bits."""
    found = [p.detach().clone() for chunk in model.chunks for p in chunk.parameters()]
    for optimizer in model._torch_optimizers():
        for group in optimizer.param_groups:
            found += [p.detach().clone() for p in group["params"]]
            found.append(torch.tensor([group["lr"], float(group.get("step", 0))], dtype=torch.float64))
        found += [x.clone() for s in optimizer.state.values() for x in s.values() if isinstance(x, Tensor)]
    return [*found, torch.tensor(model.scheduler.num_steps)]


def around_a_bad_step(folder: Path, layout: dict[str, Any], kind: str) -> Any:
    """Steps 1, then a bad one as step 2, then 3. Returns (was the state equal, what the bad one said, pieces at the end, lr)."""
    groups = create_role_groups({"actor": bodies.layout_for(folder, layout)}, seed=1)["actor"]
    optimizer = OptimizerConfig(**{**OPTIMIZER.__dict__, "distributed": layout.get("dp", 1) > 1})
    model = Trainee(bodies.load_model(folder, groups, layout), groups, Way(1).batching, optimizer, "actor")
    actor = Actor(model, 1.0, AlgorithmConfig(), 0.0)
    rows, number = Way(1).rows(groups, BATCH)
    actor.update(rows, number, 1)
    before = state(model)
    said = None
    if kind == "gradient":
        is_last = groups.coordinates.dp == groups.layout.dp - 1

        def flat(output: Tensor, micro_batch: MicroBatch) -> LossSums:
            """0, with a slope that is not a number, on the last data-parallel rank alone."""
            nothing = output * 0
            return LossSums((nothing.sqrt() if is_last else nothing).sum(), micro_batch.mask.sum(), {}, {})

        said = model.update(rows, number, (), flat, 2)
    elif kind != "none":
        bad_rows, number = Way(1).rows(groups, bad(kind))
        said = actor.update(bad_rows, number, 2)[1]
    equal = all(torch.equal(a, b) for a, b in zip(before, state(model), strict=True))
    metrics = actor.update(rows, number, 3)[1]
    return equal, said, bodies.exported_pieces(model), metrics["lr"]


REASONS = {
    "nan": "loss not finite",
    "inf": "loss not finite",
    "gradient": "gradient not finite",
    "no valid token": "no valid token",
}


@pytest.mark.parametrize("layout", ["one", "dp2_distributed", "pp2_vpp2", pytest.param("tp2_pp2", marks=pytest.mark.long)])
def test_a_bad_step_changes_nothing_on_any_rank(pool: Pool, llama_folder: Path, layout: str) -> None:
    how = LAYOUTS[layout]
    want = pool.run(world(how), around_a_bad_step, llama_folder, how, "none")
    for kind, reason in REASONS.items():
        found = pool.run(world(how), around_a_bad_step, llama_folder, how, kind)
        for (equal, said, pieces, lr), (_, _, want_pieces, want_lr) in zip(found, want, strict=True):
            assert equal, kind
            assert said == {"skipped": reason}
            assert lr == want_lr  # step 3's: the skipped step's is not made up for
            assert all(torch.equal(a[-1], b[-1]) for a, b in zip(pieces, want_pieces, strict=True)), kind
