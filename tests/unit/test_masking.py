"""Do masked tokens never count?"""

from __future__ import annotations

import statistics

import pytest
import torch

from megappo.algorithms.masking import (
    mask_from_lengths,
    masked_mean,
    masked_sum,
    masked_whiten,
    response_mask_from_eos,
)

NAN = float("nan")


def test_a_response_mask_ends_with_the_first_end_token() -> None:
    ids = torch.tensor([[0, 0, 2, 42, 3, 5, 1, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0, 0], [5, 5, 5, 5, 5, 5, 5, 5, 5]])
    mask = response_mask_from_eos(ids, [1])
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [[1, 1, 1, 1, 1, 1, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0, 0], [1] * 9]


def test_any_of_several_end_tokens_ends_a_response() -> None:
    ids = torch.tensor([[4, 9, 4, 7, 4], [4, 7, 4, 9, 4], [4, 4, 4, 4, 9]])
    assert response_mask_from_eos(ids, [7, 9]).int().tolist() == [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]


def test_the_pad_token_may_be_the_end_token() -> None:
    end = pad = 1
    ids = torch.tensor([[5, end, pad, pad]])
    assert response_mask_from_eos(ids, [end]).int().tolist() == [[1, 1, 0, 0]]


def test_a_mask_from_lengths_does_not_look_at_tokens() -> None:
    assert mask_from_lengths(torch.tensor([0, 2, 4]), 4).int().tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]


def test_sums_and_means_are_over_valid_tokens_only() -> None:
    values, mask = torch.tensor([1.0, NAN, 3.0, float("inf")]), torch.tensor([True, False, True, False])
    assert masked_sum(values, mask) == 4.0
    assert masked_mean(values, mask) == 2.0
    assert masked_mean(values, torch.zeros(4, dtype=torch.bool)) == 0.0


def test_a_masked_nan_leaves_no_nan_in_the_gradient() -> None:
    values = torch.tensor([1.0, -1.0], requires_grad=True)
    masked_sum(values.sqrt(), torch.tensor([True, False])).backward()
    assert values.grad is not None
    assert values.grad[0] == 0.5


def test_whitening_gives_mean_0_and_variance_1_over_valid_tokens() -> None:
    values = torch.tensor([[1.0, NAN, 3.0], [5.0, 100.0, 7.0]])
    mask = torch.tensor([[True, False, True], [True, False, True]])
    white = masked_whiten(values, mask)
    # mean 4, unbiased variance (9 + 1 + 1 + 9) / 3 = 6.6667, so -3, -1, 1, 3 over 2.58199
    torch.testing.assert_close(white, torch.tensor([[-1.161895, 0.0, -0.387298], [0.387298, 0.0, 1.161895]]))


def test_whitening_few_tokens_is_finite() -> None:
    values = torch.tensor([5.1, 7.3, 7.3, NAN])
    for mask, wanted in (
        ([False, False, False, False], [0.0, 0.0, 0.0, 0.0]),
        ([True, False, False, False], [0.0, 0.0, 0.0, 0.0]),
        ([True, True, False, False], [-0.707107, 0.707107, 0.0, 0.0]),
        ([False, True, True, False], [0.0, 0.0, 0.0, 0.0]),  # constant values
    ):
        torch.testing.assert_close(masked_whiten(values, torch.tensor(mask)), torch.tensor(wanted))


@pytest.mark.parametrize("value", [0.7, -50.3, 1e4])
def test_values_that_do_not_vary_whiten_to_0_however_many(value: float) -> None:
    """A mean summed in float32 is off by rounding, which division by nearly no deviation blows up."""
    values, mask = torch.full((100, 1003), value), torch.rand(100, 1003) > 0.1
    assert masked_whiten(values, mask).abs().max() == 0


@pytest.mark.parametrize("offset, atol", [(0, 1e-6), (100, 1e-4)])
def test_whitening_equals_the_definition_in_float64(offset: int, atol: float) -> None:
    torch.manual_seed(0)
    values, mask = torch.randn(9, 6) * 3 + offset, torch.rand(9, 6) > 0.5
    mask[4] = False  # a response without a token
    values = torch.where(mask, values, NAN)
    found = masked_whiten(values, mask)
    kept = values[mask].tolist()
    mean, deviation = statistics.fmean(kept), statistics.stdev(kept)
    wanted = torch.tensor([(x - mean) / deviation for x in kept])
    torch.testing.assert_close(found[mask], wanted, atol=atol, rtol=0)
    assert (found[~mask] == 0).all()
