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
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megappo.config.convert import MANDATORY, all_keys, build, options_of
from megappo.config.nearest import nearest_key
from megappo.config.resolve import Command, mandatory_keys, resolve
from megappo.config.schema import Config
from megappo.errors import UserError

_OVERRIDE = re.compile(r"(?P<key>\w[\w-]*(\.\w[\w-]*)*)=(?P<value>.*)", re.DOTALL)


def load_config(path: str | Path, overrides: Sequence[str] = (), command: Command = "train") -> Config:
    """The config in `path` with `overrides` (`a.b=c`) applied, checked key by key and resolved.

    Raises UserError with one line for each unknown key, wrong type, malformed override and missing mandatory key.
    """
    return _merged(_read(Path(path)), overrides, command, str(path))


def load_overrides(overrides: Sequence[str], base: Mapping[str, Any], command: Command) -> Config:
    """As `load_config`, for a command without a config file. base: nested values that the command brings; overrides win."""
    return _merged(OmegaConf.create(_plain(base)), overrides, command, None)


def overridden_keys(overrides: Sequence[str]) -> list[str]:
    """The keys that are set by `a.b=c`; malformed ones are left for `load_config` to refuse."""
    return [match["key"] for text in overrides if (match := _OVERRIDE.fullmatch(text))]


def _merged(file: DictConfig, overrides: Sequence[str], command: Command, path: str | None) -> Config:
    errors: list[str] = []
    layers = [OmegaConf.create(_plain(Config())), file, *(_parse_override(text, errors) for text in overrides)]
    try:
        data = OmegaConf.to_container(_merge(layers, [path or "", *overrides]), resolve=True)
    except OmegaConfBaseException as error:
        where = f"{path}: " if path else ""
        raise UserError("\n".join([*errors, f"{where}{_first_line(error)} (key {error.full_key})"])) from None
    assert isinstance(data, dict)
    config = build(Config, data, errors)
    errors += [
        f"{key} is mandatory and not set; {f'add it to {path} or ' if path else ''}pass {key}=VALUE"
        for key in mandatory_keys(command)
        if _value_of(config, key) in (MANDATORY, None)
    ]
    if errors:
        raise UserError("\n".join(errors))
    return resolve(config, command)


def dump_config(config: Config) -> str:
    """The config as YAML that `load_config` reads back to the same config."""
    return OmegaConf.to_yaml(OmegaConf.create(_plain(config)))


def _merge(layers: Sequence[DictConfig], names: Sequence[str]) -> Any:
    """The first layer under all others. names: where each of the others comes from."""
    merged: Any = layers[0]
    for layer, name in zip(layers[1:], names, strict=True):
        try:
            merged = OmegaConf.merge(merged, layer)
        except TypeError:  # omegaconf does not say where
            raise UserError(
                f"{name}: a section stands where a list belongs, or a list where a section does; give a list as a whole, "
                f"e.g. reward.parts=[{{function: exact_match}}]"
            ) from None
    return merged


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
        if str not in options_of(key):
            errors.append(f"override {text!r}: the value is not valid YAML ({_first_line(error)}); quote it or mend it")
            return DictConfig({})
        value = raw
    if _is_typed_text(options_of(key), value):
        value = raw  # a run called 007 stays 007
    nested: Any = value
    for word in reversed(key.split(".")):
        nested = {word: nested}
    return DictConfig(nested)


def _is_typed_text(options: Sequence[Any], value: Any) -> bool:
    """Whether what YAML made of an override is to be the string that was typed. A key that also takes a list keeps a list."""
    kept: tuple[type, ...] = (str, type(None)) if len(options) == 1 else (str, type(None), ListConfig)
    return str in options and not isinstance(value, kept)


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
