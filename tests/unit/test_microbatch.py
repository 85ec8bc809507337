"""How samples become micro-batches, against literal lists."""

from __future__ import annotations

import pytest
import torch

from megappo.models.microbatch import MicroBatching, make_micro_batches
from tests.models import make_batch


def numbered(batch: dict[str, torch.Tensor], *numbers: int) -> dict[str, torch.Tensor]:
    return {**batch, "micro_batch": torch.tensor(numbers, dtype=torch.long)}


def test_samples_go_where_their_number_says() -> None:
    batch = numbered(make_batch([2, 1, 3], [1, 2, 2]), 1, 0, 1)
    first, second = make_micro_batches(batch, 2, MicroBatching())
    assert (first.attention.tolist(), second.attention.tolist()) == ([3], [3, 5])
    assert (first.rows.tolist(), second.rows.tolist()) == ([1, 1], [0, 2, 2])
    assert (first.num_tokens, second.num_tokens) == (3, 8)


@pytest.mark.parametrize("packed", [True, False])
def test_a_stand_in_counts_for_nothing(packed: bool) -> None:
    batch = {name: value[:1] for name, value in make_batch([2], [3]).items()}
    real, stand_in = make_micro_batches(numbered(batch, 0), 2, MicroBatching(packed), ("advantages",))
    assert real.mask.tolist() == [True, True, True]
    assert stand_in.mask.tolist() == [False]
    assert (real.num_tokens, stand_in.num_tokens) == (5, 0)


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
    (packed,) = make_micro_batches(numbered(batch, 0, 0), 1, MicroBatching(), ("x",))
    assert packed.input_ids.tolist() == [[11, 12, 21, 22, 31, 32, 33, 41]]
    assert packed.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert packed.attention.tolist() == [4, 4]
    assert packed.input_ids[0, packed.scored].tolist() == [12, 21, 33]
    assert packed.labels.tolist() == [21, 22, 41]
    assert packed.fields["x"].tolist() == [1.0, 2.0, 3.0]
    (padded,) = make_micro_batches(numbered(batch, 0, 0), 1, MicroBatching(packed=False), ("x",))
    assert padded.input_ids.t().flatten()[padded.scored].tolist() == [12, 21, 33]
    assert padded.positions.tolist() == [[0, 0, 1, 2, 3], [0, 1, 2, 3, 3]]  # counted from the first real token
    assert padded.labels.tolist() == [21, 22, 41]


def test_a_pack_is_padded_by_a_sequence_of_its_own() -> None:
    (packed,) = make_micro_batches(numbered(make_batch([2, 1], [2, 2]), 0, 0), 1, MicroBatching(length_multiple=4))
    assert packed.attention.tolist() == [4, 3, 1]
    assert packed.input_ids.shape == (1, 8)


def test_no_samples_still_make_a_pass() -> None:
    batch = {name: value[:0] for name, value in make_batch([2, 1], [2, 2]).items()}
    micro_batches = make_micro_batches(numbered(batch), 2, MicroBatching(), ("advantages",))
    assert len(micro_batches) == 2
    assert not any(micro_batch.mask.any() for micro_batch in micro_batches)
