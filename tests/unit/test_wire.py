"""What arrives is what was sent: names, dtypes, shapes, bits."""

from __future__ import annotations

import math

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.controller.wire import DTYPES, decode, encode, plain


def as_bytes(frames):
    return [bytes(frame) for frame in frames]


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def assert_same(sent, got):
    assert list(sent) == list(got)
    for name in sent:
        assert (got[name].dtype, got[name].shape) == (sent[name].dtype, sent[name].shape)
        assert bits(got[name]) == bits(sent[name])


@settings(max_examples=60, deadline=None)
@given(dtype=st.sampled_from(sorted(DTYPES)), shape=st.lists(st.integers(0, 4), max_size=3), seed=st.integers(0, 9))
def test_every_dtype_and_shape_arrives_bit_for_bit(dtype, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(0, 2, shape, generator=generator).to(DTYPES[dtype])
    header, got = decode(as_bytes(encode({"call": 1}, {"x": tensor, "empty": torch.zeros(0, 3)})))
    assert header == {"call": 1}
    assert_same({"x": tensor, "empty": torch.zeros(0, 3)}, got)


def test_nan_infinity_and_negative_zero_keep_their_bits():
    tensor = torch.tensor([math.nan, math.inf, -math.inf, -0.0], dtype=torch.bfloat16)
    assert_same({"x": tensor}, decode(as_bytes(encode({}, {"x": tensor})))[1])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).reshape(3, 4).t(),
        torch.arange(12).reshape(3, 4)[:, ::2],
        torch.arange(3).expand(2, 3),
        torch.arange(10)[3:7],
        torch.tensor(7),
        torch.ones(2, requires_grad=True),
    ],
    ids=["transposed", "strided", "expanded", "sliced", "0-dim", "with gradient"],
)
def test_tensors_that_are_no_plain_blocks_of_memory_arrive(tensor):
    assert_same({"x": tensor.detach()}, decode(as_bytes(encode({}, {"x": tensor})))[1])


def test_large_and_small_tensors_arrive_over_a_socket_and_may_be_written_to():
    context = zmq.Context()
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    port = receiver.bind_to_random_port("tcp://127.0.0.1")
    sender.connect(f"tcp://127.0.0.1:{port}")
    sent = {"mask": torch.tensor([True, False, True]), "ids": torch.arange(50_000), "x": torch.rand(77, 3).bfloat16()}
    sender.send_multipart(encode({"role": "actor"}, sent), copy=False)
    header, got = decode(receiver.recv_multipart(copy=False))
    context.destroy(linger=0)
    assert header == {"role": "actor"}
    assert_same(sent, got)
    got["ids"][0] = 9
    assert sent["ids"][0] == 0
    assert got["ids"][:3].tolist() == [9, 1, 2]


def test_a_frame_that_is_too_short_is_an_error():
    frames = as_bytes(encode({}, {"x": torch.zeros(4)}))
    with pytest.raises(ValueError, match="takes 16 bytes, 12 arrived"):
        decode([frames[0], frames[1][:12]])
    with pytest.raises(ValueError, match="1 tensors, the message holds 0"):
        decode(frames[:1])


def test_a_complex_tensor_is_refused():
    with pytest.raises(TypeError, match=r"'z' is torch\.complex64"):
        encode({}, {"z": torch.zeros(1, dtype=torch.complex64)})


def test_plain_values_keep_their_values_and_tuples_become_lists():
    value = {"lr": 0.1, "n": 2**62, "name": "a", "none": None, "flag": True, "list": [1, [2.5]], "pair": (1, 2)}
    assert plain(value) == {**value, "pair": [1, 2]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {3: 1}}, r"value\['a'\] has the key 3"),
        ({"a": [torch.ones(1)]}, r"value\['a'\]\[0\] is a Tensor"),
        ({1, 2}, "value is a set"),
    ],
)
def test_what_json_would_change_or_lose_is_refused_and_named(value, message):
    with pytest.raises(TypeError, match=message):
        plain(value)
