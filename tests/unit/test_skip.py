"""Do all ranks skip the same steps, and only those that would do harm?"""

from __future__ import annotations

import pytest
import torch

from megappo.algorithms.skip import skip_flags, skip_reason

NAN, INF = float("nan"), float("inf")


def decide(*ranks: tuple[float, float, int]) -> str | None:
    flags = [skip_flags(torch.tensor(loss), torch.tensor(gradient), torch.tensor(tokens)) for loss, gradient, tokens in ranks]
    return skip_reason(torch.stack(flags).sum(0).tolist())


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_one_bad_rank_is_enough(bad: float) -> None:
    assert decide((1.0, 2.0, 5), (0.5, 0.0, 0)) is None  # a rank without tokens is no reason
    assert decide((1.0, 2.0, 5), (bad, 2.0, 5)) == "loss not finite"
    assert decide((1.0, 2.0, 5), (1.0, bad, 5)) == "gradient not finite"
    assert decide((INF, 1.0, 5), (-INF, 1.0, 5)) == "loss not finite"  # which do not cancel


def test_a_step_without_any_token_is_skipped() -> None:
    assert decide((0.0, 0.0, 0), (0.0, 0.0, 0)) == "no valid token"


def test_a_tensor_of_gradients_counts_once_and_flags_are_never_nan() -> None:
    flags = skip_flags(torch.tensor(NAN), torch.tensor([1.0, NAN, INF]), torch.tensor(3))
    assert flags.tolist() == [3.0, 1.0, 1.0]
    assert flags.dtype == torch.float64
