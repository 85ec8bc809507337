"""Which family is this model of? The registry of families, looked up by the architecture that `config.json` names. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

from megappo.errors import UserError
from megappo.models.families import llama
from megappo.models.families.rules import ParamRule
from megappo.models.shape import ModelShape, read_hf_config

_FAMILIES: dict[str, ModuleType] = {"llama": llama}


def shape_of(folder: str | Path, head: str = "lm") -> ModelShape:
    """Sizes of the model in a Hugging Face folder. Raises UserError for an architecture that no family covers."""
    config = read_hf_config(folder)
    names = config.get("architectures") or []
    for family in _FAMILIES.values():
        if any(name in family.ARCHITECTURES for name in names):
            try:
                shape: ModelShape = family.shape_from_hf(config)
            except KeyError as error:
                raise UserError(
                    f"{folder}/config.json lacks the key {error}; copy the file again from the model's source"
                ) from None
            return replace(shape, head=head)
    known = sorted(name for family in _FAMILIES.values() for name in family.ARCHITECTURES)
    raise UserError(f"{folder}/config.json architectures={names} is not supported; use one of {', '.join(known)}")


def rules_of(shape: ModelShape) -> tuple[ParamRule, ...]:
    """The rules of this model's parameters: the family's, less the head that it does not have."""
    absent = {"lm_head"} if shape.head == "value" or shape.tied else set()
    if shape.head != "value":
        absent.add("value_head")
    return tuple(rule for rule in _FAMILIES[shape.family].RULES if rule.part not in absent)
