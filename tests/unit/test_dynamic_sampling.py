"""Are exactly the groups dropped that teach nothing, and is the batch refilled within bounds?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.algorithms.dynamic_sampling import Refill, rows_with_signal

NAN = float("nan")


def test_groups_of_equal_scores_go() -> None:
    #                       all wrong    mixed      all .1 (no binary fraction)  one alone
    scores = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.1, 0.1, 0.1, 5.0])
    ids = torch.tensor([3, 3, 3, 8, 8, 1, 1, 1, 4])
    mask = torch.ones(9, 2, dtype=torch.bool)
    assert rows_with_signal(scores, ids, mask).tolist() == [False] * 3 + [True] * 2 + [False] * 4


def test_a_response_without_tokens_makes_no_difference() -> None:
    mask = torch.tensor([[True], [False], [True], [True], [True]])
    scores, ids = torch.tensor([1.0, NAN, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1])
    assert rows_with_signal(scores, ids, mask).tolist() == [False, False, False, True, True]


def test_a_score_that_is_no_number_is_not_hidden() -> None:
    mask = torch.ones(2, 1, dtype=torch.bool)
    assert rows_with_signal(torch.tensor([NAN, 1.0]), torch.tensor([0, 0]), mask).tolist() == [True, True]


def test_a_batch_is_refilled_until_it_is_full() -> None:
    books = Refill(wanted=3, max_rounds=4)
    assert books.needs_more and books.missing == 3
    books = books.after_round([False, True, False])
    assert (books.kept, books.missing, books.dropped, books.needs_more) == ((1,), 2, 2, True)
    books = books.after_round([True, True, True, False])
    assert (books.kept, books.missing, books.surplus, books.dropped) == ((1, 3, 4), 0, 1, 3)
    assert (books.sampled, books.rounds, books.needs_more) == (7, 2, False)
    with pytest.raises(ValueError, match="needs no further round: 3 of 3 groups after 2 rounds"):
        books.after_round([True])


def test_the_rounds_are_bounded() -> None:
    books = Refill(wanted=2, max_rounds=2).after_round([False, False]).after_round([True])
    assert not books.needs_more
    assert (books.kept, books.missing, books.dropped) == ((2,), 1, 2)
    with pytest.raises(ValueError, match="needs no further round"):
        books.after_round([True])


@pytest.mark.parametrize("wanted, rounds", [(0, 1), (1, 0)])
def test_a_batch_of_nothing_is_refused(wanted: int, rounds: int) -> None:
    with pytest.raises(ValueError, match="at least one group and one round"):
        Refill(wanted, rounds)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.lists(st.lists(st.booleans(), max_size=5), min_size=5, max_size=5))
def test_the_books_balance(wanted: int, max_rounds: int, rounds: list[list[bool]]) -> None:
    books, told = Refill(wanted, max_rounds), []
    while books.needs_more:
        told += rounds[books.rounds]
        books = books.after_round(rounds[books.rounds])
    good = [i for i, signal in enumerate(told) if signal]
    assert books.kept == tuple(good[:wanted])
    assert books.surplus == max(0, len(good) - wanted)
    assert books.dropped == len(told) - len(good)
    assert books.rounds <= max_rounds
