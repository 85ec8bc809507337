"""How samples become micro-batches, against literal lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megappo.models.microbatch import MicroBatching, fill_up, group_by_size, group_by_tokens, make_micro_batches
from tests.models import make_batch


def test_eight_samples_of_seven_tokens_at_a_budget_of_eight_make_eight_groups() -> None:
    assert group_by_tokens([7] * 8, 8) == [[i] for i in range(8)]


def test_a_sample_above_the_budget_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"a sample of 9 tokens is above micro_batch_tokens=8; raise it to 9 or more"):
        group_by_tokens([7, 9], 8)


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(50, 120))
def test_groups_cover_each_sample_once_and_keep_the_budget(lengths: list[int], budget: int) -> None:
    groups = group_by_tokens(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in group) <= budget for group in groups)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("count", range(13))
def test_the_interleaved_schedule_gets_a_multiple_of_the_stages(count: int, stages: int) -> None:
    groups = fill_up(group_by_size(count, 1), stages)
    assert len(groups) % stages == 0 and groups
    assert sorted(i for group in groups for i in group) == list(range(count))


def test_large_groups_are_halved_before_empty_ones_are_added() -> None:
    assert fill_up([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], 4) == [[0, 1], [2, 3], [4, 5, 6, 7], [8, 9]]
    assert fill_up([[0]], 2) == [[0], []]


@pytest.mark.parametrize("packed", [True, False])
def test_a_stand_in_counts_for_nothing(packed: bool) -> None:
    batch = {name: value[:1] for name, value in make_batch([2], [3]).items()}
    real, stand_in = make_micro_batches(batch, MicroBatching(size=1, packed=packed, count_multiple=2), ("advantages",))
    assert real.mask.tolist() == [True, True, True]
    assert stand_in.mask.tolist() == [False]


def test_the_token_in_front_predicts() -> None:
    ids = torch.tensor([[0, 11, 12, 21, 22], [31, 32, 33, 41, 0]])
    attention = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
    response = torch.tensor([[1, 1], [1, 0]]).bool()
    batch = {
        "input_ids": ids,
        "attention_mask": attention,
        "response_mask": response,
        "x": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    }
    (packed,) = make_micro_batches(batch, MicroBatching(size=2), ("x",))
    assert packed.input_ids.tolist() == [[11, 12, 21, 22, 31, 32, 33, 41]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert packed.attention.tolist() == [4, 4]
    assert packed.input_ids[0, packed.scored].tolist() == [12, 21, 33]
    assert packed.labels.tolist() == [21, 22, 41]
    assert packed.fields["x"].tolist() == [1.0, 2.0, 3.0]
    (padded,) = make_micro_batches(batch, MicroBatching(size=2, packed=False), ("x",))
    assert padded.input_ids.t().flatten()[padded.scored].tolist() == [12, 21, 33]
    assert padded.labels.tolist() == [21, 22, 41]


def test_a_pack_is_padded_by_a_sequence_of_its_own() -> None:
    (packed,) = make_micro_batches(make_batch([2, 1], [2, 2]), MicroBatching(size=2, length_multiple=4))
    assert packed.attention.tolist() == [4, 3, 1]
    assert packed.input_ids.shape == (1, 8)


def test_no_samples_still_make_a_pass() -> None:
    batch = {name: value[:0] for name, value in make_batch([2, 1], [2, 2]).items()}
    micro_batches = make_micro_batches(batch, MicroBatching(size=2, count_multiple=2), ("advantages",))
    assert len(micro_batches) == 2
    assert not any(micro_batch.mask.any() for micro_batch in micro_batches)
