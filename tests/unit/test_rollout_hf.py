"""Does the hf engine sample from the right distribution? Numbers small enough to check by hand."""

from __future__ import annotations

import math

import pytest
import torch

from megappo.rollout.engine import SamplingParams
from megappo.rollout.hf_engine import inverse_cdf, left_pad, processed_log_probs, uniform_draws


def sampling(temperature: float = 1.0, top_p: float = 1.0, top_k: int = -1) -> SamplingParams:
    return SamplingParams(temperature, top_p, top_k, 4, ())


LOGITS = torch.tensor([[math.log(0.1), math.log(0.4), math.log(0.2), math.log(0.3)]])


@pytest.mark.parametrize(
    "params, expected",
    [
        (sampling(), [0.1, 0.4, 0.2, 0.3]),
        (sampling(temperature=0.5), [1 / 30, 16 / 30, 4 / 30, 9 / 30]),  # squares of 1, 4, 2, 3
        (sampling(temperature=0.0), [0.1, 0.4, 0.2, 0.3]),  # greedy: untempered
        (sampling(top_k=2), [0, 4 / 7, 0, 3 / 7]),
        (sampling(top_p=0.65), [0, 4 / 7, 0, 3 / 7]),  # 0.4 < 0.65, the token that crosses stays
        (sampling(top_p=0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
        (sampling(top_p=0.01), [0.0, 1.0, 0.0, 0.0]),
        (sampling(top_k=3, top_p=0.45), [0, 4 / 7, 0, 3 / 7]),  # top-p over 4/9, 3/9, 2/9
        (sampling(top_k=9), [0.1, 0.4, 0.2, 0.3]),
    ],
)
def test_probabilities_after_temperature_top_k_and_top_p(params: SamplingParams, expected: list[float]) -> None:
    torch.testing.assert_close(processed_log_probs(LOGITS, params).exp(), torch.tensor([expected]), atol=1e-6, rtol=0)


def test_a_draw_picks_the_token_whose_interval_holds_it() -> None:
    log_p = torch.tensor([0.25, 0.0, 0.5, 0.25, 0.0]).log().expand(6, -1)
    draws = torch.tensor([0.0, 0.2, 0.25, 0.7, 0.76, 1 - 1e-16], dtype=torch.float64)
    assert inverse_cdf(log_p, draws).tolist() == [0, 0, 2, 2, 3, 3]


def test_prompts_are_padded_on_the_left() -> None:
    ids, mask = left_pad([[5], [6, 7, 8]])
    assert ids.tolist() == [[0, 0, 5], [6, 7, 8]]
    assert mask.tolist() == [[False, False, True], [True, True, True]]


def test_draws_depend_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    first = uniform_draws([11, 12], 8)
    torch.manual_seed(1)
    again = uniform_draws([12, 13, 11], 8)
    assert torch.equal(first[0], again[2]) and torch.equal(first[1], again[0])
    assert not torch.equal(first[0], first[1])
