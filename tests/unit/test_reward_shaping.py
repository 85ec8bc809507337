"""Are scores scaled, clipped and punished for length as the formulas say?"""

from __future__ import annotations

import statistics

import pytest
import torch

from megappo.algorithms.reward_shaping import RunningMoments, overlong_penalty, shape_scores

NAN = float("nan")


def test_the_overlong_penalty_grows_over_the_buffer() -> None:
    # 20 tokens allowed, the last 4 of them are the buffer
    lengths = torch.tensor([0, 1, 16, 17, 18, 19, 20, 21, 1000])
    assert overlong_penalty(lengths, max_length=20, buffer=4).tolist() == [0, 0, 0, -0.25, -0.5, -0.75, -1, -1, -1]


@pytest.mark.parametrize("buffer", [0, -1, 21])
def test_a_buffer_outside_the_length_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match=r"must lie in 1\.\.max_length=20"):
        overlong_penalty(torch.tensor([1]), 20, buffer)


def test_scores_are_scaled_then_clipped() -> None:
    assert shape_scores(torch.tensor([1.0, -3.0, 0.1]), scale=2.0, clip=5.0).tolist() == pytest.approx([2.0, -5.0, 0.2])
    with pytest.raises(ValueError, match="above 0, got 0"):
        shape_scores(torch.ones(1), clip=0.0)


def test_running_moments_are_those_of_all_scores_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(20, generator=generator).double() * 3 + 1000
    moments = RunningMoments()
    for start, end in ((0, 1), (1, 1), (1, 8), (8, 20)):
        part = torch.cat((scores[start:end], torch.tensor([NAN]).double()))  # the last one was skipped
        moments = moments.with_scores(part, torch.arange(end - start + 1) < end - start)
    assert moments.count == 20
    assert moments.mean == pytest.approx(statistics.mean(scores.tolist()), rel=1e-12)
    assert moments.std == pytest.approx(statistics.stdev(scores.tolist()), rel=1e-9)


def test_without_a_spread_nothing_is_divided() -> None:
    for scores in ([], [5.0], [5.0, 5.0]):
        moments = RunningMoments().with_scores(torch.tensor(scores), torch.ones(len(scores), dtype=torch.bool))
        assert shape_scores(torch.tensor([3.0]), moments=moments).tolist() == [3.0]


def test_scores_are_divided_by_the_running_deviation_and_keep_their_mean() -> None:
    moments = RunningMoments().with_scores(torch.tensor([0.0, 4.0]), torch.tensor([True, True]))  # unbiased std 2.828427
    assert shape_scores(torch.tensor([0.0, 4.0]), moments=moments).tolist() == pytest.approx([0.0, 1.414214])
