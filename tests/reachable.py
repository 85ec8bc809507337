"""Which tensors does a model still hold? Follows attributes, items and keys, as a garbage collector does."""

from __future__ import annotations

import enum
import numbers
import types
import warnings
from typing import Any

import torch
import torch.distributed as dist

_LEAVES = (
    *(str, bytes, numbers.Number, type, enum.Enum, torch.dtype, torch.device, dist.ProcessGroup),
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType),
)


def reachable_bytes(**roots: Any) -> dict[str, int]:
    """{path of the first tensor found on it: bytes} of every storage that is not empty."""
    waiting = [(value, name) for name, value in roots.items()]
    seen: dict[int, Any] = {}
    storages: dict[int, tuple[str, int]] = {}
    while waiting:
        value, path = waiting.pop()
        if value is None or id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen[id(value)] = value  # kept, so that no other object gets its id
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages.setdefault(storage._cdata, (path, storage.nbytes()))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Megatron hangs gradients on tensors that are no leaves
                waiting.append((value.grad, f"{path}.grad"))
        if isinstance(value, dict):
            for i, (key, item) in enumerate(value.items()):
                waiting += [(item, f"{path}[{key if isinstance(key, str) else i}]"), (key, f"{path}.keys()[{i}]")]
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += [(item, f"{path}[{i}]") for i, item in enumerate(value)]
        elif isinstance(value, types.MethodType):
            waiting.append((value.__self__, path))
        else:
            waiting += [(item, f"{path}.{name}") for name, item in getattr(value, "__dict__", {}).items()]
    return {path: num_bytes for path, num_bytes in storages.values() if num_bytes}
