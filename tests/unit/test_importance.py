"""Are tokens weighed by how much likelier the trainer finds them than the engine did, within bounds?"""

from __future__ import annotations

import math

import pytest
import torch

from megappo.algorithms.importance import effective_sample_fraction, importance_weights

NAN, INF = float("nan"), float("inf")

TRAINER = torch.tensor([[-1.0, -2.0, NAN], [-1.0, -INF, -0.5], [NAN, NAN, NAN]])
ENGINE = torch.tensor([[-1.5, -1.0, NAN], [-3.0, -INF, -0.5], [NAN, NAN, NAN]])
MASK = torch.tensor([[True, True, False], [True, False, True], [False, False, False]])
# token ratios: exp(.5) = 1.648721, exp(-1) = .367879; exp(2) = 7.389056, 1. Rows: exp(-.5) = .606531, exp(2)


@pytest.mark.parametrize(
    "level, bound, floor, wanted, bounded",
    [
        ("token", "truncated", 0.0, [[1.648721, 0.367879, 0], [2.0, 0, 1.0], [0, 0, 0]], 1),
        ("token", "masked", 0.0, [[1.648721, 0.367879, 0], [0, 0, 1.0], [0, 0, 0]], 1),
        ("token", "masked", 0.5, [[1.648721, 0, 0], [0, 0, 1.0], [0, 0, 0]], 2),
        ("sequence", "truncated", 0.0, [[0.606531, 0.606531, 0], [2.0, 0, 2.0], [0, 0, 0]], 1),
        ("sequence", "masked", 0.0, [[0.606531, 0.606531, 0], [0, 0, 0], [0, 0, 0]], 1),
    ],
)
def test_known_weights(level, bound, floor: float, wanted: list[list[float]], bounded: int) -> None:
    found = importance_weights(TRAINER, ENGINE, MASK, level, bound, cap=2.0, floor=floor)
    torch.testing.assert_close(found.weights, torch.tensor(wanted), atol=1e-6, rtol=0)
    assert found.num == (4 if level == "token" else 2)
    assert found.sums["bounded"] == bounded
    ratios = [1.648721, 0.367879, 7.389056, 1.0] if level == "token" else [0.606531, 7.389056]
    assert found.sums["ratio"].item() == pytest.approx(sum(ratios), rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bound", ["truncated", "masked"])
def test_equal_log_probs_weigh_1_and_are_all_effective(level, bound) -> None:
    log_probs = torch.randn(4, 5)
    mask = torch.rand(4, 5) > 0.3
    found = importance_weights(log_probs, log_probs, mask, level, bound, cap=1.0)
    assert torch.equal(found.weights, mask.float())
    sums = found.sums
    assert effective_sample_fraction(float(found.num), float(sums["weight"]), float(sums["weight_squared"])) == 1.0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_are_finite_and_carry_no_gradient(level) -> None:
    trainer = torch.tensor([[90.0, 90.0], [-90.0, -90.0]], requires_grad=True)
    found = importance_weights(trainer, torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool), level, "truncated", cap=INF)
    assert torch.isfinite(found.weights).all()
    assert not found.weights.requires_grad


def test_the_effective_sample_fraction_of_known_weights() -> None:
    weights = [2.0, 1.0, 1.0, 0.0]
    assert effective_sample_fraction(4, math.fsum(weights), math.fsum(w * w for w in weights)) == pytest.approx(16 / 24)
    assert effective_sample_fraction(4, 5.0, 25.0) == 0.25  # one weight alone
    assert effective_sample_fraction(0, 0.0, 0.0) == 0.0
    assert effective_sample_fraction(3, 0.0, 0.0) == 0.0  # all left out


@pytest.mark.parametrize(
    "cap, floor, bound", [(0.0, 0.0, "masked"), (2.0, 3.0, "masked"), (2.0, -1.0, "masked"), (2.0, 0.5, "truncated")]
)
def test_bounds_without_sense_are_refused(cap: float, floor: float, bound) -> None:
    with pytest.raises(ValueError, match="importance weights"):
        importance_weights(TRAINER, ENGINE, MASK, "token", bound, cap, floor)
