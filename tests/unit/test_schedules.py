"""Is the learning rate at each step the one on paper, and Megatron's own?"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megappo.algorithms.schedules import lr_at

PLAN = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 4, "decay_steps": 12}


@pytest.mark.parametrize(
    "decay, wanted",
    [
        ("constant", {0: 0.0, 1: 0.25, 4: 1.0, 5: 1.0, 12: 1.0, 100: 1.0}),
        ("linear", {0: 0.0, 2: 0.5, 4: 1.0, 6: 0.775, 8: 0.55, 12: 0.1, 13: 0.1, 100: 0.1}),
        ("cosine", {0: 0.0, 2: 0.5, 4: 1.0, 6: 0.8681981, 8: 0.55, 10: 0.2318019, 12: 0.1, 13: 0.1, 20: 0.1, 10**6: 0.1}),
    ],
)
def test_known_rates(decay, wanted: dict[int, float]) -> None:
    assert {step: lr_at(step, decay=decay, **PLAN) for step in wanted} == pytest.approx(wanted, rel=1e-6)


def test_the_cosine_never_rises_after_the_warm_up() -> None:
    rates = [lr_at(step, decay="cosine", **PLAN) for step in range(4, 60)]
    assert all(after <= before for before, after in pairwise(rates))


def test_without_a_warm_up_the_first_step_has_the_full_rate() -> None:
    assert lr_at(0, lr=0.3, min_lr=0.0, warmup_steps=0, decay_steps=10, decay="cosine") == 0.3


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup, end", [(0, 10), (4, 12), (1, 2)])
def test_megatrons_scheduler_gives_the_same(decay, warmup: int, end: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=2e-3,
        min_lr=5e-4,
        lr_warmup_steps=warmup,
        lr_decay_steps=end,
        lr_decay_style=decay,
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    for step in range(1, 20):
        scheduler.step(1)
        wanted = lr_at(step, lr=2e-3, min_lr=5e-4, warmup_steps=warmup, decay_steps=end, decay=decay)
        assert math.isclose(optimizer.param_groups[0]["lr"], wanted, rel_tol=1e-12)


@pytest.mark.parametrize("step, warmup, end", [(-1, 0, 5), (1, -1, 5), (1, 5, 5)])
def test_steps_without_sense_are_refused(step: int, warmup: int, end: int) -> None:
    with pytest.raises(ValueError, match="the decay's end"):
        lr_at(step, lr=1.0, min_lr=0.0, warmup_steps=warmup, decay_steps=end, decay="linear")
