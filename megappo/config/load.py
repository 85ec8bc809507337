"""How does a file with overrides become a config? `load_config`: YAML, then `a.b=c`, onto the frozen dataclasses. No torch.

The file may use OmegaConf's interpolation (`${run.dir}/x`, `${oc.env:HOME}`). Of two overrides of one key the later wins;
one key twice in one section of the file is refused. Relative paths stay relative to the current directory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megappo.config.convert import MANDATORY, all_keys, build, strip_optional, type_of
from megappo.config.nearest import nearest_key
from megappo.config.resolve import Command, resolve
from megappo.config.schema import Config
from megappo.errors import UserError

_OVERRIDE = re.compile(r"(?P<key>\w[\w-]*(\.\w[\w-]*)*)=(?P<value>.*)", re.DOTALL)


def load_config(path: str | Path, overrides: Sequence[str] = (), command: Command = "train") -> Config:
    """The config in `path` with `overrides` (`a.b=c`) applied, checked key by key and resolved.

    Raises UserError with one line for each unknown key, wrong type, malformed override and missing mandatory key.
    """
    errors: list[str] = []
    layers = [OmegaConf.create(_plain(Config())), _read(Path(path)), *(_parse_override(text, errors) for text in overrides)]
    try:
        data = OmegaConf.to_container(OmegaConf.merge(*layers), resolve=True)
    except OmegaConfBaseException as error:
        raise UserError("\n".join([*errors, f"{path}: {_first_line(error)} (key {error.full_key})"])) from None
    assert isinstance(data, dict)
    config = build(Config, data, errors)
    errors += [
        f"{key} is mandatory and not set; add it to {path} or pass {key}=VALUE"
        for key in all_keys()
        if _value_of(config, key) == MANDATORY and (command == "sft" or not key.startswith("sft."))
    ]
    if errors:
        raise UserError("\n".join(errors))
    return resolve(config, command)


def dump_config(config: Config) -> str:
    """The config as YAML that `load_config` reads back to the same config."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(config)))


def _read(path: Path) -> DictConfig:
    try:
        loaded = OmegaConf.create(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"config file {str(path)!r} does not exist; give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {str(path)!r} cannot be read ({error}); give the path of a YAML file") from None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: not valid YAML ({error.problem}); mend that line") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path}: not valid YAML ({_first_line(error)}); mend the file") from None
    if not isinstance(loaded, DictConfig):
        raise UserError(f"{path}: holds a list, not sections; start with a section such as `run:`")
    return loaded


def _parse_override(text: str, errors: list[str]) -> DictConfig:
    """`a.b=c` as nested config; empty, with a line in `errors`, where it is malformed."""
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        near = nearest_key(text.partition("=")[0].strip(". "), list(all_keys()))
        example = f"{near or 'actor.optimizer.lr'}=VALUE"
        errors.append(f"override {text!r} is not of the form a.b=c; write it like {example}")
        return DictConfig({})
    key, raw = match["key"], match["value"]
    try:
        value = OmegaConf.select(OmegaConf.from_dotlist([f"value={raw}"]), "value") if "${" not in raw else raw
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        if strip_optional(type_of(key)) is not str:
            errors.append(f"override {text!r}: the value is not valid YAML ({_first_line(error)}); quote it or mend it")
            return DictConfig({})
        value = raw
    if strip_optional(type_of(key)) is str and not isinstance(value, str) and value is not None:
        value = raw  # a run called 007 stays 007
    nested: Any = value
    for word in reversed(key.split(".")):
        nested = {word: nested}
    return DictConfig(nested)


def _plain(value: Any) -> Any:
    """Dataclasses as dicts and tuples as lists, with literal `${` kept from being read as an interpolation."""
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.replace("${", r"\${") if isinstance(value, str) else value


def _value_of(config: Config, key: str) -> Any:
    value: Any = config
    for word in key.split("."):
        value = getattr(value, word, None)
    return value


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
