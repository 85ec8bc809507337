"""Does this plain data fit the schema? `build`: nested dicts onto the frozen dataclasses, all misfits listed. No torch.

Nothing is guessed: "3" is no number, true is no integer, and an unknown key is refused with the nearest known one.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megappo.config.frozen import freeze
from megappo.config.nearest import nearest_key
from megappo.config.schema import Config

T = TypeVar("T")

MANDATORY = "???"
"""The value of a key that has no default."""

_KINDS = {bool: "true or false", int: "an integer", float: "a finite number", str: "a string"}


def build(cls: type[T], data: Mapping[Any, Any], errors: list[str], prefix: str = "") -> T:
    """An instance of the dataclass `cls` from `data`. Each misfit adds one line to `errors`; the default stands in its place."""
    hints = get_type_hints(cls)
    by_name = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    errors += [_unknown(f"{prefix}{key}", prefix, list(by_name)) for key in data if key not in by_name]
    values = {}
    for name, field in by_name.items():
        if name in data:
            values[name] = _convert(hints[name], data[name], f"{prefix}{name}", default_of(field), errors)
        elif is_dataclass(hints[name]):
            values[name] = build(hints[name], {}, errors, f"{prefix}{name}.")
    return cls(**values)


def default_of(field: Field[Any]) -> Any:
    """The default of a schema field; every field has one."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def all_keys(cls: type = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, sections before what they hold."""
    hints = get_type_hints(cls)
    for field in fields(cls):
        key = f"{prefix}{field.name}"
        yield key
        inner = strip_optional(hints[field.name])
        if is_dataclass(inner):
            yield from all_keys(inner, f"{key}.")  # type: ignore[arg-type]


def type_of(key: str) -> Any | None:
    """Type hint of a dotted key, None where the schema has no such key."""
    hint: Any = Config
    for word in key.split("."):
        hint = strip_optional(hint)
        hint = get_type_hints(hint).get(word) if is_dataclass(hint) else None
    return hint


def options_of(key: str) -> tuple[Any, ...]:
    """The types, besides None, that a dotted key of the schema can have; (None,) where there is no such key."""
    hint = strip_optional(type_of(key))
    return get_args(hint) if is_union(hint) else (hint,)


def strip_optional(hint: Any) -> Any:
    """`X` of `X | None`, and `X | Y` of `X | Y | None`; else the hint itself."""
    if is_union(hint):
        return Union[tuple(option for option in get_args(hint) if option is not type(None))]  # noqa: UP007 - made at run time
    return hint


def is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def is_section_list(hint: Any) -> bool:
    """Whether it is a tuple of dataclasses: a list of sections in YAML."""
    return get_origin(hint) is tuple and is_dataclass(get_args(hint)[0])


def _convert(hint: Any, value: Any, key: str, default: Any, errors: list[str]) -> Any:
    inner = strip_optional(hint)
    if value is None and inner is not hint:
        return None
    if is_dataclass(inner):
        if value is None:  # a section whose keys are all commented out
            value = {}
        if isinstance(value, Mapping):
            return build(inner, value, errors, f"{key}.")  # type: ignore[arg-type]
        errors.append(f"{key}={value!r} is {_kind(value)}; {key} is a section: give its keys, e.g. {key}.{fields(inner)[0].name}")
        return default
    if is_section_list(inner) and isinstance(value, list | tuple):
        return tuple(_section(get_args(inner)[0], item, f"{key}[{i}]", errors) for i, item in enumerate(value))
    if isinstance(value, str) and value == MANDATORY:
        return value
    wanted = _misfit(inner, value)
    if wanted is not None:
        example = "" if default in (None, MANDATORY, (), {}) or get_origin(inner) is Literal else f", e.g. {_shown(default)}"
        errors.append(f"{key}={_shown(value)} is {_kind(value)}; give {wanted}{example}")
        return default
    if inner is float:
        return float(value)
    return freeze(value)


def _section(cls: Any, value: Any, key: str, errors: list[str]) -> Any:
    """One section of a list of sections."""
    if not isinstance(value, Mapping):
        wanted = f"give its keys, e.g. {{{fields(cls)[0].name}: VALUE}}"
        errors.append(f"{key}={_shown(value)} is {_kind(value)}; {key} is a section: {wanted}")
        return cls()
    section = build(cls, value, errors, f"{key}.")
    errors += [
        f"{key}.{field.name} is mandatory and not set; add it"
        for field in fields(cls)
        if getattr(section, field.name) == MANDATORY
    ]
    return section


def _misfit(hint: Any, value: Any) -> str | None:
    """What was wanted, in words; None where the value fits the type."""
    origin, args = get_origin(hint), get_args(hint)
    if is_union(hint):
        wanted = [_misfit(option, value) for option in args]
        return None if None in wanted else " or ".join(map(str, wanted))
    if origin is Literal:
        return None if isinstance(value, str) and value in args else "one of " + ", ".join(map(str, args))
    if is_section_list(hint):
        return "a list of sections"
    if origin is tuple:
        item, length = args[0], None if args[-1] is Ellipsis else len(args)
        fits = isinstance(value, list | tuple) and length in (None, len(value)) and all(_misfit(item, v) is None for v in value)
        number = f"{length} values" if length else "values"
        return None if fits else f"a list of {number}, each {_misfit(item, None)}"
    if origin is dict:
        return None if isinstance(value, Mapping) else "a section (key: value)"
    if hint is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    else:
        fits = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    return None if fits else _KINDS[hint]


def _unknown(key: str, prefix: str, siblings: list[str]) -> str:
    in_list = prefix.endswith("].")  # a key of a section in a list is near its siblings only
    near = nearest_key(key, [f"{prefix}{name}" for name in siblings] if in_list else list(all_keys()))
    word = key.removeprefix(prefix)
    if "." in word:
        nested = word.replace(".", ": {") + ": VALUE" + "}" * word.count(".")
        return f"{key}: a dotted key works as an override only; in a file nest it: {nested}"
    if near is not None:
        return f"{key} is not a key; did you mean {near}?"
    where = prefix.rstrip(".") or "the top level"
    return f"{key} is not a key; {where} knows {', '.join(siblings)}"


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, Mapping):
        return "a section"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    return {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
