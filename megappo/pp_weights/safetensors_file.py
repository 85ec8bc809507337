"""How is a safetensors file written that is larger than memory? Header first, from shapes and dtypes; then tensor by tensor.

The bytes are those that safetensors itself writes; its own writer wants all tensors at once.
Format: u64 length of the header, header (JSON, padded with spaces to 8 bytes), data.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import TracebackType

import torch

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Dtypes of model weights, by safetensors' names."""


class SafetensorsFile:
    """A file for the given tensors (name -> shape, dtype), which `write` takes in any order, each once."""

    def __init__(self, path: Path, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        # wide dtypes first, so that every tensor is aligned to its own
        for name, (shape, dtype) in sorted(tensors.items(), key=lambda item: (-item[1][1].itemsize, item[0])):
            stop = offset + prod(shape) * dtype.itemsize
            header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, stop]}
            offset = stop
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._tensors = tensors
        self._starts = {name: 8 + len(text) + header[name]["data_offsets"][0] for name in tensors}  # type: ignore[index]
        self._file = open(path, "wb")  # noqa: SIM115 - closed by __exit__
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        shape, dtype = self._tensors[name]
        assert tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}, the header says {shape}"
        data = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
        self._file.seek(self._starts[name])
        self._file.write(data.reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
