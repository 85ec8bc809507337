"""A batch and what is done with it: against plain lists."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.algorithms.masking import masked_mean
from megappo.data.proto import DataProto, pad_dataproto_to_divisor, union_tensor_dict, unpad_dataproto


def make(rows=4, **meta):
    ids = torch.arange(rows)
    return DataProto.from_dict(
        {"ids": ids, "scores": ids.float() / 2, "response_mask": torch.ones(rows, 3, dtype=torch.bool)},
        {"answer": [f"a{i}" for i in range(rows)], "spans": [[i, i + 1] for i in range(rows)]},
        meta,
    )


def ids(data):
    """The rows, told by a tensor; every other column must tell the same."""
    rows = data.batch["ids"].tolist()
    assert data.batch["scores"].tolist() == [i / 2 for i in rows]
    assert data.non_tensor_batch["answer"].tolist() == [f"a{i}" for i in rows]
    assert data.non_tensor_batch["spans"].tolist() == [[i, i + 1] for i in rows]
    assert len(data) == len(rows)
    return rows


def test_columns_of_unequal_rows_are_refused():
    with pytest.raises(ValueError, match=r"same number of rows, not \{'a': 2, 'b': 3, 'c': 2\}"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)}, {"c": ["x", "y"]})
    with pytest.raises(ValueError, match=r"\{'a': None\}"):
        DataProto.from_dict({"a": torch.tensor(1.0)})
    with pytest.raises(ValueError, match=r"'a' is a tensor and another column, too"):
        DataProto.from_dict({"a": torch.zeros(1)}, {"a": ["x"]})
    with pytest.raises(ValueError, match="a batch without a column needs num_rows"):
        DataProto.from_dict({})
    assert len(DataProto.from_dict(num_rows=3)) == 3


def test_rows_are_chosen_by_slice_list_mask_and_from_the_end():
    data = make()
    assert ids(data[1:3]) == [1, 2]
    assert ids(data[[3, 0, 3]]) == [3, 0, 3]
    assert ids(data[torch.tensor([True, False, False, True])]) == [0, 3]
    assert ids(data[np.array([-1])]) == [3]
    assert ids(data[[]]) == []
    with pytest.raises(IndexError, match="row 4 is not in a batch of 4 rows"):
        data[[0, 4]]
    with pytest.raises(IndexError, match="a mask of 2 rows does not fit a batch of 4"):
        data[torch.tensor([True, False])]
    with pytest.raises(IndexError, match="not by"):
        data[[0.5]]


def test_select_keeps_the_named_columns_and_the_mark_of_padding_rows():
    data = make(3, step=7, note="x")
    some = data.select(["ids"], ["answer"], ["step"])
    assert (list(some.tensors()), list(some.non_tensor_batch), some.meta_info) == (["ids"], ["answer"], {"step": 7})
    assert some.batch["ids"] is data.batch["ids"]
    assert set(data.select(["ids"]).non_tensor_batch) == {"answer", "spans"}
    padded, _ = pad_dataproto_to_divisor(data, 2)
    assert padded.select(["ids"]).row_mask.tolist() == [True, True, True, False]
    with pytest.raises(KeyError, match=r"no tensor 'idz'; there are \['ids', 'response_mask', 'scores'\]"):
        data.select(["idz"])
    with pytest.raises(KeyError, match="no fact 'stop'"):
        data.select(meta_info_keys=["stop"])


def test_union_takes_the_columns_of_both_and_leaves_both_alone():
    one, two = make(2, step=1), DataProto.from_dict({"values": torch.ones(2)}, {"id": ["p", "q"]}, {"epoch": 0})
    both = one.union(two)
    assert set(both.tensors()) == {"ids", "scores", "response_mask", "values"}
    assert both.non_tensor_batch["id"].tolist() == ["p", "q"] and both.meta_info == {"step": 1, "epoch": 0}
    assert "values" not in one.batch and "ids" not in two.batch


def test_shared_columns_must_be_equal_where_nan_equals_nan():
    nan = math.nan
    first = DataProto.from_dict({"x": torch.tensor([nan, 1.0])}, {"parts": [{"a": nan}, [1, (nan,)]]}, {"m": [nan]})
    second = DataProto.from_dict({"x": torch.tensor([nan, 1.0])}, {"parts": [{"a": float("nan")}, [1, (nan,)]]}, {"m": [nan]})
    assert len(first.union(second)) == 2


@pytest.mark.parametrize(
    "other, message",
    [
        ({"tensors": {"x": torch.tensor([1.0, 3.0])}}, r"tensor 'x' .* first in row 1, 2.0 and 3.0"),
        ({"tensors": {"x": torch.tensor([1.0, math.nan])}}, r"tensor 'x' .* row 1, 2.0 and nan"),
        ({"tensors": {"x": torch.tensor([1, 2])}}, r"tensor 'x' .* torch.float32 \(2,\) and torch.int64 \(2,\)"),
        ({"tensors": {"x": torch.ones(2, 1)}}, r"tensor 'x' .* \(2,\) and torch.float32 \(2, 1\)"),
        ({"non_tensors": {"y": ["a", "c"]}}, r"non-tensor column 'y' .* first in row 1, b and c"),
        ({"non_tensors": {"y": ["a", b"b"]}}, r"non-tensor column 'y'"),
        ({"tensors": {"z": torch.ones(2)}, "meta_info": {"m": True}}, r"fact 'm' .* 1 and True"),
        ({"tensors": {"x": torch.ones(3)}}, r"batches of \(2,\) and \(3,\) rows cannot be united"),
    ],
)
def test_what_differs_is_named(other, message):
    data = DataProto.from_dict({"x": torch.tensor([1.0, 2.0])}, {"y": ["a", "b"]}, {"m": 1})
    with pytest.raises(ValueError, match=message):
        data.union(DataProto.from_dict(**other))


def test_two_tensordicts_unite():
    first, second = make(2).batch, DataProto.from_dict({"v": torch.ones(2), "ids": torch.arange(2)}).batch
    assert set(union_tensor_dict(first, second).keys()) == {"ids", "scores", "response_mask", "v"}


def test_250_rows_padded_to_a_multiple_of_8_repeat_the_first_six():
    padded, pad_size = pad_dataproto_to_divisor(make(250), 8)
    assert pad_size == 6
    assert ids(padded) == [*range(250), *range(6)]
    assert padded.row_mask.tolist() == [True] * 250 + [False] * 6


@given(rows=st.integers(1, 12), divisor=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_padding_wraps_and_comes_off_again(rows, divisor):
    data = make(rows, step=3)
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) == -(-rows // divisor) * divisor == rows + pad_size
    assert ids(padded) == [i % rows for i in range(len(padded))]
    assert padded.row_mask.tolist() == [i < rows for i in range(len(padded))]
    back = unpad_dataproto(padded, pad_size)
    assert ids(back) == list(range(rows)) and set(back.tensors()) == set(data.tensors()) and back.meta_info == {"step": 3}
    if pad_size == 0:
        assert padded is data and back is data


def test_padding_rows_change_no_mean_over_tokens():
    data = make(3)
    data.batch["values"] = torch.tensor([[1.0, 2.0, 3.0]] * 2 + [[50.0, 60.0, 70.0]])
    data.batch["response_mask"][2, 1:] = False
    mean = masked_mean(data.batch["values"], data.batch["response_mask"])
    padded, _ = pad_dataproto_to_divisor(data, 7)
    assert masked_mean(padded.batch["values"], padded.batch["response_mask"]) == mean
    assert padded.batch["scores"][padded.row_mask].mean() == data.batch["scores"].mean()
    assert data.batch["response_mask"].sum() == 7, "the batch that was padded stays as it was"


def test_padding_of_a_padded_batch_marks_only_what_counts():
    padded, _ = pad_dataproto_to_divisor(make(3), 4)
    twice, pad_size = pad_dataproto_to_divisor(padded, 5)
    assert twice.row_mask.tolist() == [True, True, True, False, False]
    once = unpad_dataproto(twice, pad_size)
    assert once.row_mask.tolist() == [True, True, True, False]


def test_rows_that_count_are_not_taken_off():
    padded, pad_size = pad_dataproto_to_divisor(make(3), 5)
    padded.reorder([4, 3, 2, 1, 0])
    with pytest.raises(ValueError, match="2 of the last 2 rows are no padding; put the batch back in its own order"):
        unpad_dataproto(padded, pad_size)
    with pytest.raises(ValueError, match="cannot take 9 padding rows off a batch of 5"):
        unpad_dataproto(padded, 9)
    with pytest.raises(ValueError, match="cannot pad to a multiple of 0"):
        pad_dataproto_to_divisor(padded, 0)


def test_no_rows_are_a_multiple_of_anything():
    nothing = make(0)
    assert pad_dataproto_to_divisor(nothing, 4) == (nothing, 0)


@given(st.permutations(range(7)))
@settings(max_examples=30, deadline=None)
def test_reorder_is_in_place_and_its_inverse_restores(order):
    data, tensor = make(7), torch.tensor(order)
    before = data.batch["ids"]
    assert data.reorder(tensor) is None
    assert ids(data) == list(order)
    assert before.tolist() == list(range(7)), "what shares the old tensors is not changed"
    data.reorder(np.argsort(order))
    assert ids(data) == list(range(7))


@pytest.mark.parametrize("order", [[0, 1], [0, 1, 1], [0, 1, 3], [0, 1, 2, 2], [-1, 0, 1], [True, True, True], [0.5, 1, 2], []])
def test_what_is_no_permutation_is_refused(order):
    data = make(3)
    with pytest.raises(ValueError, match=r"cannot reorder 3 rows by .*: it must name each row exactly once"):
        data.reorder(order)
    assert ids(data) == [0, 1, 2]


def test_split_and_concat():
    data = make(7, step=1)
    assert [ids(part) for part in data.split(3)] == [[0, 1, 2], [3, 4, 5], [6]]
    whole = DataProto.concat(data.split(3))
    assert ids(whole) == list(range(7)) and whole.meta_info == {"step": 1}
    with pytest.raises(ValueError, match="cannot split into batches of 0 rows"):
        data.split(0)


def test_parts_that_do_not_fit_together_are_named():
    tensors = {"ids": torch.zeros(1), "response_mask": torch.zeros(1, 3), "values": torch.zeros(1)}
    other = DataProto.from_dict(tensors, {"answer": ["a"], "spans": [[0]]})
    with pytest.raises(ValueError, match=r"part 1 .* tensors missing \['scores'\], more than there \['values'\]"):
        DataProto.concat([make(2), other])
    with pytest.raises(ValueError, match=r"'x' of part 1 is torch.float32 \(1, 3\), of part 0 torch.float32 \(2, 2\)"):
        DataProto.concat([DataProto.from_dict({"x": torch.ones(2, 2)}), DataProto.from_dict({"x": torch.ones(1, 3)})])
    with pytest.raises(ValueError, match=r"'x' of part 1 is torch\.int64"):
        DataProto.concat([DataProto.from_dict({"x": torch.ones(2)}), DataProto.from_dict({"x": torch.ones(2, dtype=torch.long)})])
    with pytest.raises(ValueError, match="fact 'step'"):
        DataProto.concat([make(1, step=1), make(1, step=2)])
    with pytest.raises(ValueError, match="nothing to concatenate"):
        DataProto.concat([])


def test_repeat_interleaved_or_one_copy_after_the_other():
    assert ids(make(2).repeat(3)) == [0, 0, 0, 1, 1, 1]
    assert ids(make(2).repeat(3, interleave=False)) == [0, 1, 0, 1, 0, 1]
    assert ids(make(2).repeat(0)) == []


@given(rows=st.integers(0, 12), size=st.integers(1, 14), epochs=st.integers(0, 3), seed=st.integers(0, 2**40))
@settings(max_examples=80, deadline=None)
def test_mini_batches_hold_each_row_once_an_epoch(rows, size, epochs, seed):
    data = make(rows)
    parts = [ids(part) for part in data.make_iterator(size, epochs, seed)]
    sizes = [size] * (rows // size) + [rows % size] * (rows % size > 0)
    assert list(map(len, parts)) == sizes * epochs
    seen = [row for part in parts for row in part]
    for epoch in range(epochs):
        assert sorted(seen[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    assert parts == [ids(part) for part in make(rows).make_iterator(size, epochs, seed)]


def test_epochs_and_seeds_differ_and_nobodys_generator_is_touched():
    torch.manual_seed(5)
    one = [ids(part) for part in make(64).make_iterator(64, 2, 1)]
    torch.manual_seed(6)  # as another rank may have it
    state = torch.get_rng_state()
    assert one == [ids(part) for part in make(64).make_iterator(64, 2, 1)]
    assert one[0] != one[1] and one != [ids(part) for part in make(64).make_iterator(64, 2, 2)]
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(ValueError, match="mini_batch_size=0"):
        next(make(2).make_iterator(0, 1, 1))
