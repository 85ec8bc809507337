"""How does a free-form section of the config stay unchangeable? `FrozenDict`: a dict that refuses every change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn


class FrozenDict(dict[str, Any]):
    """A dict that cannot be changed; copies, pickles and compares as one."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a loaded config cannot be changed; pass the value as an override (a.b=c) instead")

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def freeze(value: Any) -> Any:
    """Lists as tuples and dicts as FrozenDicts, all the way down."""
    if isinstance(value, Mapping):
        return FrozenDict({str(key): freeze(item) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item) for item in value)
    return value
