"""Is the order of the prompts a function of seed and epoch alone, each source held to its share, and resumed exactly?"""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megappo.data.prompts import PromptRow
from megappo.data.stream import PromptStream, epoch_order
from megappo.errors import UserError


def rows(*counts: int) -> list[PromptRow]:
    """Rows of sources a, b, ...: as many of each as `counts` says."""
    sources = [name for name, count in zip("abcdefgh", counts, strict=False) for _ in range(count)]
    return [PromptRow(i, (i,), str(i), None, source=source) for i, source in enumerate(sources)]


def served(stream: PromptStream, num_rows: int) -> list[int]:
    return [row.row_id for row in stream.next_batch(num_rows)]


class TestOneSet:
    def test_order_is_this_one_on_every_machine(self) -> None:
        assert epoch_order(8, seed=1234, epoch=0) == [5, 6, 3, 7, 4, 1, 2, 0]
        assert epoch_order(8, seed=1234, epoch=1) == [2, 0, 7, 6, 1, 4, 5, 3]

    @pytest.mark.parametrize("num_rows", [1, 2, 7, 100])
    def test_each_epoch_serves_each_row_once(self, num_rows: int) -> None:
        stream = PromptStream(rows(num_rows), seed=3)
        for epoch in range(3):
            order = served(stream, num_rows)
            assert sorted(order) == list(range(num_rows))
            assert order == epoch_order(num_rows, 3, epoch)

    def test_a_batch_goes_on_into_the_next_epoch_without_loss(self) -> None:
        stream = PromptStream(rows(5), seed=3)
        order = [i for _ in range(5) for i in served(stream, 3)]
        assert order == epoch_order(5, 3, 0) + epoch_order(5, 3, 1) + epoch_order(5, 3, 2)

    def test_a_batch_larger_than_the_data_repeats_it(self) -> None:
        assert served(PromptStream(rows(2), seed=3, shuffle=False), 5) == [0, 1, 0, 1, 0]

    def test_sources_without_weights_are_one_set(self) -> None:
        assert served(PromptStream(rows(2, 3), seed=3), 10) == epoch_order(5, 3, 0) + epoch_order(5, 3, 1)

    def test_another_seed_gives_another_order(self) -> None:
        assert epoch_order(100, 1, 0) != epoch_order(100, 2, 0)


class TestMix:
    def test_three_to_one_takes_every_fourth_row_from_the_second_source(self) -> None:
        stream = PromptStream(rows(3, 2), seed=3, shuffle=False, weights=(3, 1))
        assert served(stream, 12) == [0, 1, 3, 2, 0, 1, 4, 2, 0, 1, 3, 2]

    def test_each_source_has_epochs_of_its_own(self) -> None:
        stream = PromptStream(rows(6, 4), seed=3, weights=(0.5, 0.5))
        order = served(stream, 24)
        assert [i for i in order if i < 6] == epoch_order(6, 3, 0) + epoch_order(6, 3, 1)
        assert [i - 6 for i in order if i >= 6] == [i for epoch in range(3) for i in epoch_order(4, 3, epoch, source=1)]

    def test_sources_of_one_length_are_not_shuffled_alike(self) -> None:
        assert epoch_order(50, 3, 0) == epoch_order(50, 3, 0, source=0) != epoch_order(50, 3, 0, source=1)

    @given(st.lists(st.floats(0.001, 10), min_size=2, max_size=8))
    @example([9, 9, 1, 1, 1])  # where taking the source that is furthest behind would leave the second one a whole row short
    @settings(max_examples=60, deadline=None)
    def test_each_source_is_within_one_row_of_its_share_at_any_time(self, weights: list[float]) -> None:
        stream = PromptStream(rows(*[5] * len(weights)), seed=1, weights=weights)
        exact = [Fraction(str(weight)) for weight in weights]
        counts: Counter[str] = Counter()
        for number in range(1, 121):
            counts[stream.next_batch(1)[0].source] += 1
            for name, weight in zip("abcdefgh", exact, strict=False):
                assert abs(counts[name] - number * weight / sum(exact)) < 1

    def test_whole_shares_are_met_exactly(self) -> None:
        stream = PromptStream(rows(7, 7, 7), seed=1, weights=(0.5, 0.3, 0.2))
        for _ in range(20):
            assert Counter(row.source for row in stream.next_batch(10)) == {"a": 5, "b": 3, "c": 2}

    def test_a_weight_too_few_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"data\.weights has 1 values for 2 sources"):
            PromptStream(rows(2, 2), seed=1, weights=(1,))


@pytest.mark.parametrize("weights", [None, (2, 1, 1)])
@pytest.mark.parametrize("shuffle", [True, False])
class TestResume:
    def test_a_resumed_stream_goes_on_with_the_very_next_row(self, weights: tuple[float, ...] | None, shuffle: bool) -> None:
        data = rows(7, 3, 4)
        for num_before in range(40):
            straight, resumed = (PromptStream(data, 5, shuffle, weights) for _ in range(2))
            served(straight, num_before)
            resumed.load_state(json.loads(json.dumps(straight.state())))
            assert served(resumed, 30) == served(straight, 30)

    def test_a_state_is_small_and_taken_at_one_moment(self, weights: tuple[float, ...] | None, shuffle: bool) -> None:
        stream = PromptStream(rows(700, 300, 400), 5, shuffle, weights)
        state = json.dumps(stream.state())
        assert len(state) < 400
        saved = stream.state()
        served(stream, 5)
        assert json.dumps(saved) == state

    def test_other_data_or_another_order_are_refused(self, weights: tuple[float, ...] | None, shuffle: bool) -> None:
        data = rows(7, 3, 4)
        state = json.loads(json.dumps(PromptStream(data, 5, shuffle, weights).state()))
        changed = [*data[:-1], PromptRow(13, (99,), "99", None, source="c")]
        answered = [*data[:-1], PromptRow(13, (13,), "13", "yes", source="c")]
        other = (1, 1, 1) if weights else (2, 1, 1)
        for stream, message in [
            (PromptStream(data[:-1], 5, shuffle, weights), r"the number of rows of data\.train is \["),
            (PromptStream(changed, 5, shuffle, weights), r"the digest of the rows of data\.train is"),
            (PromptStream(answered, 5, shuffle, weights), r"the digest of the rows of data\.train is"),
            (PromptStream(data, 6, shuffle, weights), r"run\.seed is 6, but the saved run had 5"),
            (PromptStream(data, 5, not shuffle, weights), r"data\.shuffle is"),
            (PromptStream(data, 5, shuffle, other), r"data\.weights is"),
        ]:
            with pytest.raises(UserError, match=message):
                stream.load_state(state)
