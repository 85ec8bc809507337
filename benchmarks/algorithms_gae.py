"""How fast are advantages? Ours beside verl's loop and slime's chunked scan; correctness first. One process, one thread.

    python -m benchmarks.algorithms_gae FILE    the measurements, as JSON; `rows` makes rows of them

Beside verl both sides whiten, since verl's function does. Responses are half to all of the width. slime's takes no mask.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.parts import Found
from benchmarks.peers import optional, slime, verl, versions
from benchmarks.report import Row, beside
from benchmarks.timing import contest
from megappo.algorithms.advantages import gae, gae_by_blocks
from megappo.algorithms.masking import masked_whiten

GAMMA, LAMBDA = 0.99, 0.95
VERL_SIZES = {"256x2048": (256, 2048, 21), "64x32768": (64, 32768, 5)}  # samples, width, rounds
SLIME_SIZE = (512, 1024, 21)
GOALS = {"256x2048": 30, "64x32768": 100}
FALLBACK_GOAL = 10

Gae = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


def rows(found: Found) -> list[Row]:
    """The rows of the table, then those of the fallback in plain torch."""
    made = [beside(f"gae_{size}_vs_verl", found[size], "verl", goal) for size, goal in GOALS.items()]
    made.append(beside("gae_512x1024_vs_slime", found["512x1024"], "slime", 2))
    for size in GOALS:
        fallback = found[size] | {"ours": found[size]["fallback"]}
        made.append(beside(f"gae_{size}_fallback_vs_verl", fallback, "verl", FALLBACK_GOAL))
    return made


def inputs(samples: int, width: int, full: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, values, mask."""
    generator = torch.Generator().manual_seed(1)
    rewards, values = (torch.randn(samples, width, generator=generator) for _ in range(2))
    lengths = torch.randint(width // 2, width + 1, (samples,), generator=generator)
    mask = torch.arange(width) < (torch.full_like(lengths, width) if full else lengths)[:, None]
    return rewards * mask, values * mask, mask


def exact(rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The definition in float64, token by token."""
    rewards, values, valid = rewards.double(), values.double(), mask.double()
    next_value, advantage = torch.zeros(2, rewards.shape[0], dtype=torch.float64)
    advantages = torch.zeros_like(rewards)
    for t in range(rewards.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + GAMMA * next_value - values[:, t]
        advantage = torch.where(mask[:, t], delta + GAMMA * LAMBDA * advantage, advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = advantage
    return advantages * valid, (advantages + values) * valid


def check(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], mask: Tensor, tolerance: float, who: str) -> None:
    for got, known, what in zip(found, wanted, ("advantages", "returns"), strict=True):
        worst = float((got.double() - known.double()).abs()[mask].max())
        assert worst <= tolerance, f"{who}: {what} are off by {worst:g}"


def whitened(compute: Gae, rewards: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    advantages, returns = compute(rewards, values, mask, GAMMA, LAMBDA)
    return masked_whiten(advantages, mask), returns


def beside_verl() -> Found:
    theirs = optional(verl, verl.load_gae)
    found: Found = {}
    for size, (samples, width, rounds) in VERL_SIZES.items():
        rewards, values, mask = inputs(samples, width, full=False)
        float_mask = mask.float()
        wanted = exact(rewards, values, mask)
        for who, compute in (("ours", gae), ("ours in torch", gae_by_blocks)):
            check(compute(rewards, values, mask, GAMMA, LAMBDA), wanted, mask, 1e-5, who)
        whole = masked_whiten(wanted[0], mask), wanted[1]
        check(whitened(gae, rewards, values, mask), whole, mask, 1e-4, "ours, whitened")
        contestants: dict[str, Callable[[], object]] = {
            "ours": lambda r=rewards, v=values, m=mask: whitened(gae, r, v, m),
            "fallback": lambda r=rewards, v=values, m=mask: whitened(gae_by_blocks, r, v, m),
        }
        if theirs is not None:
            check(theirs(rewards, values, float_mask, GAMMA, LAMBDA), whole, mask, 1e-4, "verl")
            contestants["peer"] = lambda r=rewards, v=values, m=float_mask: theirs(r, v, m, GAMMA, LAMBDA)
        found[size] = contest(contestants, rounds, warm_up=1)
    return found


def beside_slime() -> Found:
    theirs = optional(slime, slime.load_gae)
    samples, width, rounds = SLIME_SIZE
    rewards, values, mask = inputs(samples, width, full=True)
    wanted = exact(rewards, values, mask)
    check(gae(rewards, values, mask, GAMMA, LAMBDA), wanted, mask, 1e-5, "ours")
    contestants: dict[str, Callable[[], object]] = {"ours": lambda: gae(rewards, values, mask, GAMMA, LAMBDA)}
    if theirs is not None:
        check(theirs(rewards, values, GAMMA, LAMBDA), wanted, mask, 1e-3, "slime")
        contestants["peer"] = lambda: theirs(rewards, values, GAMMA, LAMBDA)
    return {"512x1024": contest(contestants, rounds)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps(beside_verl() | beside_slime() | {"peers": versions}))
