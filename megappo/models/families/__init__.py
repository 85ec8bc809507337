"""Which family is this model of? The registry of families, looked up by the architecture that `config.json` names. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from megappo.errors import UserError
from megappo.models.families import llama, mistral, qwen2, qwen3
from megappo.models.families.rules import ParamRule
from megappo.models.shape import Head, ModelShape, read_hf_config

_FAMILIES: dict[str, ModuleType] = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3}


def shape_of(folder: str | Path, head: Head | None = None) -> ModelShape:
    """Sizes of the model in a Hugging Face folder or checkpoint.

    head: what the model is to have on top; None: what the folder has. A language model can be given a value head (which then
    starts at 0); a `...ForSequenceClassification` folder with one label has one, and no vocabulary head.
    Raises UserError for an architecture that no family covers, and for a folder that cannot have the head."""
    config = read_hf_config(folder)
    names = config.get("architectures") or []
    for family in _FAMILIES.values():
        own = [found for name in names if (found := _head_of(name, family.ARCHITECTURE)) is not None]
        if not own:
            continue
        if own[0] == "value":
            _check_one_label(folder, config)
            if head == "lm":
                raise UserError(
                    f"{folder}/config.json architectures={names} has a score head and no vocabulary head, so it cannot generate; "
                    f"give a {family.ARCHITECTURE} folder"
                )
        try:
            shape: ModelShape = family.shape_from_hf(config)
        except KeyError as error:
            raise UserError(f"{folder}/config.json lacks the key {error}; copy the file again from the model's source") from None
        return replace(shape, head=head or own[0])
    known = sorted(family.ARCHITECTURE for family in _FAMILIES.values())
    raise UserError(f"{folder}/config.json architectures={names} is not supported; use one of {', '.join(known)}")


def architecture_of(shape: ModelShape) -> str:
    """The name that config.json gives a model of this family with this head."""
    name: str = _FAMILIES[shape.family].ARCHITECTURE
    return name if shape.head == "lm" else name.replace("ForCausalLM", "ForSequenceClassification")


def rules_of(shape: ModelShape) -> tuple[ParamRule, ...]:
    """The rules of this model's parameters: the family's, less the head and the biases that it does not have."""
    absent = {"lm_head"} if shape.head == "value" or shape.tied else set()
    if shape.head != "value":
        absent.add("value_head")
    rules: tuple[ParamRule, ...] = _FAMILIES[shape.family].RULES
    return tuple(rule for rule in rules if rule.part not in absent and (rule.only_with is None or getattr(shape, rule.only_with)))


def rules_in_order(shape: ModelShape) -> Iterator[tuple[ParamRule, int]]:
    """(rule, global layer number) of every parameter: embedding, layer by layer, final norm, head."""
    rules = rules_of(shape)
    yield from ((rule, 0) for rule in rules if rule.part == "embedding")
    yield from ((rule, layer) for layer in range(shape.num_layers) for rule in rules if rule.part == "layer")
    yield from ((rule, 0) for rule in rules if rule.part not in ("embedding", "layer"))


def _head_of(name: str, causal: str) -> Head | None:
    if name == causal:
        return "lm"
    return "value" if name == causal.replace("ForCausalLM", "ForSequenceClassification") else None


def _check_one_label(folder: str | Path, config: Mapping[str, Any]) -> None:
    labels = config.get("num_labels") or len(config.get("id2label") or (0, 1))  # transformers' default is two
    if labels != 1:
        raise UserError(f"{folder}/config.json has {labels} labels; a value or reward model has 1 (num_labels=1)")
