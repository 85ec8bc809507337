"""Writes docs/config.md from the docstrings of the config schema, and docs/metrics.md from the table of metrics (`make docs`)."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megappo.config import schema, schema_learning, schema_models
from megappo.config.convert import MANDATORY, default_of, is_section_list, is_union, strip_optional
from megappo.config.schema import Config
from megappo.observe.metrics import METRICS, NAMED_METRICS

DOCS = Path(__file__).resolve().parent.parent / "docs"

_CONFIG_HEAD = """# Config

<!-- Made by `make docs` from megappo/config/schema*.py. Change the docstrings there, then run it again. -->

A config is a YAML file of these sections; every key can also be given on the command line as `a.b=c`, where the later of two
wins. Unknown keys and wrong types are refused. Paths are relative to the current directory. `config.resolved.yaml` in the run
folder holds the values that a run used.
"""

_METRICS_HEAD = """# Metrics

<!-- Made by `make docs` from METRICS in megappo/observe/metrics.py. Change that table, then run it again. -->

`metrics.jsonl` in the run folder has one row a step: `step`, counted from 1, then these keys where they are measured. What is not
finite is `null`. Keys under `timing_s/`, `perf/`, `memory/` and `checkpoint/` are times, speeds and sizes; all others are the
same for two runs of one config.

| key | |
|---|---|
"""


def config_page() -> str:
    """The whole text of docs/config.md."""
    documentation = _attribute_docstrings()
    lines = [_CONFIG_HEAD]
    for field in fields(Config):
        section = get_type_hints(Config)[field.name]
        lines += [f"## `{field.name}`", "", inspect.getdoc(section) or "", "", "| key | type | default | |", "|---|---|---|---|"]
        rows = _rows(section, f"{field.name}.", documentation)
        lines += [f"| `{key}` | {kind} | {default} | {text} |" for key, kind, default, text in rows]
        lines.append("")
    return "\n".join(lines)


def metrics_page() -> str:
    """The whole text of docs/metrics.md."""
    return _METRICS_HEAD + "".join(f"| `{key}` | {text} |\n" for key, text in (METRICS | NAMED_METRICS).items())


def _rows(cls: Any, prefix: str, documentation: dict[tuple[str, str], str]) -> Iterator[tuple[str, str, str, str]]:
    hints = get_type_hints(cls)
    for field in fields(cls):
        hint = strip_optional(hints[field.name])
        key, default = f"{prefix}{field.name}", default_of(field)
        owners = ((base.__name__, field.name) for base in cls.__mro__)
        text = next(documentation[owner] for owner in owners if owner in documentation)
        if is_section_list(hint):
            yield key, "list of sections", _default(default), text
            yield from _rows(get_args(hint)[0], f"{key}[].", documentation)
        elif not is_dataclass(hint):
            yield key, _kind(hint), _default(default), text.replace("|", "\\|")
        elif default is None:  # a section of keys that are listed under the actor
            yield f"{key}.*", "section", "none", text
        else:
            yield from _rows(hint, f"{key}.", documentation)


def _kind(hint: Any) -> str:
    if is_union(hint):
        return " or ".join(map(_kind, get_args(hint)))
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) is tuple:
        return f"list of {_kind(get_args(hint)[0])}"
    return {bool: "true, false", int: "integer", float: "number", str: "string"}.get(hint, "section")


def _default(value: Any) -> str:
    if value == MANDATORY:
        return "**mandatory**"
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return f"`{list(value)}`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _attribute_docstrings() -> dict[tuple[str, str], str]:
    """{(class, field): docstring on one line}: Python keeps no docstring of a field, so they are read from the source."""
    found = {}
    sources = (inspect.getsource(module) for module in (schema, schema_learning, schema_models))
    for node in (node for source in sources for node in ast.parse(source).body):
        if not isinstance(node, ast.ClassDef):
            continue
        for statement, following in zip(node.body, node.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                match following:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        found[node.name, statement.target.id] = " ".join(text.split())
    return found


PAGES = {"config.md": config_page, "metrics.md": metrics_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
