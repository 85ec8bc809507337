"""Is a padded batch what was sampled, whatever its ids are? Masks come from lengths, never from what a token is."""

from __future__ import annotations

from megappo.trainer.batch import pad_batch, pad_columns


def test_prompts_stand_on_the_left_of_their_padding_and_responses_in_front_of_theirs() -> None:
    batch = pad_batch([[11, 12], [21]], [[31], [41, 42, 43]], pad_id=0).tensors()
    assert batch["input_ids"].tolist() == [[11, 12, 31, 0, 0], [0, 21, 41, 42, 43]]
    assert batch["attention_mask"].int().tolist() == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert batch["response_mask"].int().tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch["sample_ids"].tolist() == [0, 1]


def test_the_pad_token_may_be_the_end_token_and_stand_in_a_prompt() -> None:
    pad = end = 2
    batch = pad_batch([[pad, 7, pad], [8]], [[5, end], [pad, 6, 6, end]], pad_id=pad).tensors()
    assert batch["input_ids"].tolist() == [[pad, 7, pad, 5, end, pad, pad], [pad, pad, 8, pad, 6, 6, end]]
    assert batch["attention_mask"].int().tolist() == [[1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1]]
    assert batch["response_mask"].int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]  # the end is trained on, the padding is not


def test_columns_begin_with_the_response_and_are_0_behind_it() -> None:
    assert pad_columns([[-0.5], [-1.0, -2.0]], 3).tolist() == [[-0.5, 0.0, 0.0], [-1.0, -2.0, 0.0]]
