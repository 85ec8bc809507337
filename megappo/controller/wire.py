"""What travels between the driver and a rank? One JSON header with the schema of the tensors, then each tensor's raw bytes.

Nothing is ever unpickled. Frames are sent and received without a copy where they are large; what arrives is writable and belongs
to the receiver. Numbers, strings, booleans, None, lists and string-keyed dicts travel as JSON (a tuple arrives as a list).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
    )
}  # fmt: skip
to_json = json.JSONEncoder(separators=(",", ":")).encode
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def plain(value: Any, where: str = "value", path: tuple[object, ...] = ()) -> Any:
    """`value` as it looks after its way over the wire. Raises TypeError for what JSON would lose or change silently."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item, where, (*path, i)) for i, item in enumerate(value)]
    if isinstance(value, (dict, Mapping)):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{_at(where, path)} has the key {key!r}: only strings may be keys of what travels between ranks")
        return {key: plain(item, where, (*path, key)) for key, item in value.items()}
    raise TypeError(
        f"{_at(where, path)} is a {type(value).__name__}: only numbers, strings, booleans, None, lists and dicts "
        f"travel between ranks (tensors go into the dict of tensors)"
    )


def _at(where: str, path: tuple[object, ...]) -> str:
    return where + "".join(f"[{part!r}]" for part in path)


def described(name: str, tensor: Tensor) -> tuple[str, str, list[int]]:
    """Name, dtype and shape, as the receiver needs them. Raises TypeError for a dtype that does not travel."""
    if tensor.dtype not in NAMES:
        raise TypeError(f"tensor {name!r} is {tensor.dtype}: it cannot travel between ranks")
    return name, NAMES[tensor.dtype], list(tensor.shape)


def encode(header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> list[bytes | memoryview]:
    """The frames of one message. The tensors' memory must stay as it is until the receiver has answered."""
    schema: list[tuple[str, str, list[int]]] = []
    frames: list[bytes | memoryview] = [b""]
    for name, tensor in (tensors or {}).items():
        schema.append(described(name, tensor))
        frames.append(_bytes_of(tensor))
    frames[0] = to_json({**header, "schema": schema}).encode()
    return frames


def decode(frames: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a message. A frame is bytes or a zmq.Frame."""
    header = json.loads(_buffer(frames[0]).tobytes().decode())
    schema = header.pop("schema")
    if len(schema) != len(frames) - 1:
        raise ValueError(f"the header tells of {len(schema)} tensors, the message holds {len(frames) - 1}")
    tensors = {}
    for (name, dtype, shape), frame in zip(schema, frames[1:], strict=True):
        tensors[name] = _tensor_of(_buffer(frame), name, dtype, shape)
    return header, tensors


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)  # reshape: a 0-dim tensor has no byte view
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def _buffer(frame: Any) -> memoryview:
    return memoryview(frame) if isinstance(frame, (bytes, bytearray, memoryview)) else frame.buffer


def _tensor_of(buffer: memoryview, name: str, dtype_name: str, shape: list[int]) -> Tensor:
    dtype = DTYPES[dtype_name]
    expected = dtype.itemsize
    for size in shape:
        expected *= size
    if buffer.nbytes != expected:
        raise ValueError(f"tensor {name!r} of {dtype_name} {shape} takes {expected} bytes, {buffer.nbytes} arrived")
    if expected == 0:
        return torch.empty(shape, dtype=dtype)
    if buffer.readonly:
        buffer = memoryview(bytearray(buffer))
    flat = torch.frombuffer(buffer, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:  # a message inside a larger receive buffer may begin anywhere
        flat = flat.clone()
    return flat.view(dtype).reshape(shape)
