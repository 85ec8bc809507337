"""Is the learning rate at each step the one on paper? Megatron's scheduler, as `Trainee` drives it, over a torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

from megappo.config.resolve import resolve
from megappo.config.schema import Config, TrainerConfig
from megappo.config.schema_models import ActorConfig, OptimizerConfig
from megappo.models.lr_schedule import lr_scheduler

PLAN: dict[str, Any] = {"lr": 1.0, "min_lr_ratio": 0.1, "warmup_steps": 4, "decay_steps": 12}


def rates(config: OptimizerConfig, steps: Sequence[int]) -> list[float]:
    """The learning rates at these steps of a run, which need not follow one another."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0, weight_decay=0.0)
    scheduler = lr_scheduler(optimizer, config)  # type: ignore[arg-type]
    found = []
    for step in steps:
        scheduler.step(step - scheduler.num_steps)
        (group,) = optimizer.param_groups
        assert group["weight_decay"] == config.weight_decay
        found.append(group["lr"])
    return found


def on_paper(step: int, lr: float, low: float, warmup: int, end: int, decay: str) -> float:
    if step < warmup:
        return lr * step / warmup
    if decay == "constant":
        return lr
    if step >= end:
        return low
    done = (step - warmup) / (end - warmup)
    return lr - (lr - low) * (done if decay == "linear" else math.sin(math.pi * done / 2) ** 2)


@pytest.mark.parametrize(
    "decay, wanted",
    [
        ("constant", {1: 0.25, 4: 1.0, 5: 1.0, 12: 1.0, 100: 1.0}),
        ("linear", {2: 0.5, 4: 1.0, 6: 0.775, 8: 0.55, 12: 0.1, 13: 0.1, 100: 0.1}),
        ("cosine", {2: 0.5, 4: 1.0, 6: 0.8681981, 8: 0.55, 10: 0.2318019, 12: 0.1, 13: 0.1, 20: 0.1, 10**6: 0.1}),
    ],
)
def test_known_rates(decay: Any, wanted: dict[int, float]) -> None:
    """Steps without an update are jumped over."""
    assert rates(OptimizerConfig(decay=decay, **PLAN), list(wanted)) == pytest.approx(list(wanted.values()), rel=1e-6)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup, end", [(0, 10), (4, 12), (1, 2), (0, 1)])
@pytest.mark.parametrize("steps", [range(1, 20), (3, 4, 4, 11, 30), (19,)], ids=["each step", "some steps", "one step"])
def test_any_steps_have_the_rate_on_paper(decay: Any, warmup: int, end: int, steps: Sequence[int]) -> None:
    config = OptimizerConfig(lr=2e-3, min_lr_ratio=0.25, warmup_steps=warmup, decay_steps=end, decay=decay, weight_decay=0.3)
    wanted = [on_paper(step, 2e-3, 5e-4, warmup, end, decay) for step in steps]
    assert rates(config, steps) == pytest.approx(wanted, rel=1e-12)


def test_the_cosine_never_rises_after_the_warm_up() -> None:
    found = rates(OptimizerConfig(decay="cosine", **PLAN), range(4, 60))
    assert all(after <= before for before, after in pairwise(found))


@pytest.mark.parametrize("steps, warmup, wanted", [(2, 0, [0.55, 0.1, 0.1]), (2, 2, [0.5, 1.0, 0.1]), (3, 1, [1.0, 0.55, 0.1])])
def test_an_open_end_of_the_decay_is_the_last_step_or_right_behind_the_warm_up(
    steps: int, warmup: int, wanted: list[float]
) -> None:
    optimizer = OptimizerConfig(lr=1.0, min_lr_ratio=0.1, decay="linear", warmup_steps=warmup)
    config = resolve(Config(actor=ActorConfig(optimizer=optimizer), trainer=TrainerConfig(steps=steps)))
    assert rates(config.actor.optimizer, [1, 2, 3]) == pytest.approx(wanted)
