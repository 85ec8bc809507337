"""When are two columns the same, and what is a column that is no tensor? What `DataProto` needs to know of its parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

Objects: TypeAlias = npt.NDArray[np.object_]


def object_column(values: Sequence[Any] | npt.NDArray[Any]) -> Objects:
    """One object a row, as Python has it: lists stay lists, numbers of numpy become Python's."""
    column: Objects = np.empty(len(values), dtype=object)
    column[:] = values.tolist() if isinstance(values, np.ndarray) else list(values)  # np.array would make a matrix of equal lists
    return column


def chosen(have: Mapping[str, Any], names: Iterable[str] | None, kind: str) -> dict[str, Any]:
    """What `have` holds under these names; None: all of it."""
    if names is None:
        return dict(have)
    wanted = list(names)
    missing = [name for name in wanted if name not in have]
    if missing:
        raise KeyError(f"no {kind} {missing[0]!r}; there are {sorted(have)}")
    return {name: have[name] for name in wanted}


def united(first: Mapping[str, Any], second: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """What both hold. Values of the same name must be equal, where NaN equals NaN."""
    for name in first:
        if name in second and not equal(first[name], second[name]):
            raise ValueError(f"{kind} {name!r} is in both batches and differs: {_how_they_differ(first[name], second[name])}")
    return {**first, **second}


def equal(a: Any, b: Any) -> bool:
    """Same type, shape and values; NaN equals NaN, at any depth."""
    if a is b:
        return True
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        same = a == b
        return bool((same | (a.isnan() & b.isnan())).all() if a.is_floating_point() or a.is_complex() else same.all())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and equal(a.tolist(), b.tolist())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return type(a) is type(b) and bool(a == b)


def _how_they_differ(a: Any, b: Any) -> str:
    """Where two values of a name part: by shape, or the first row."""
    if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    if isinstance(a, (Tensor, np.ndarray)) and isinstance(b, (Tensor, np.ndarray)) and len(a) == len(b):
        row = next(i for i in range(len(a)) if not equal(a[i], b[i]))
        return f"first in row {row}, {short(a[row])} and {short(b[row])}"
    return f"{short(a)} and {short(b)}"


def short(value: Any) -> str:
    """A value in an error message."""
    shown = str(value.tolist() if isinstance(value, Tensor) else value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
