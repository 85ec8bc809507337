"""Is pass@k the chance of at least one pass among k of the samples?"""

from __future__ import annotations

from itertools import combinations

import pytest

from megappo.algorithms.pass_at_k import ks_up_to, pass_at_k


@pytest.mark.parametrize(("n", "passed"), [(1, 0), (1, 1), (4, 0), (4, 1), (4, 3), (4, 4), (6, 2)])
def test_it_equals_counting_every_choice_of_k(n: int, passed: int) -> None:
    samples = [True] * passed + [False] * (n - passed)
    for k in range(1, n + 1):
        choices = list(combinations(samples, k))
        assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_known_values() -> None:
    assert pass_at_k(4, 1, 2) == 0.5  # half of the pairs hold the one that passed
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(10, 0, 10) == 0.0


@pytest.mark.parametrize(("n", "passed", "k"), [(4, 1, 0), (4, 1, 5), (4, 5, 2), (4, -1, 2)])
def test_what_makes_no_sense_is_refused(n: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(n, passed, k)


def test_the_ks_that_are_shown() -> None:
    assert [list(ks_up_to(n)) for n in (0, 1, 2, 3, 4, 8, 10)] == [
        [],
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 10],
    ]
