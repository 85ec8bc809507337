"""What is evaluated where a model is given in place of a config? `config_of_model`: defaults that fit the model. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megappo.config.load import load_overrides, overridden_keys
from megappo.config.schema import Config
from megappo.models.shape import read_hf_config


def config_of_model(path: str, overrides: Sequence[str]) -> Config:
    """A config for `megappo eval MODEL`. The run is called as the folder, and prompts may be as long as by default, or as the
    model's positions allow. Raises UserError as `load_overrides` does, and where the folder holds no model."""
    positions = read_hf_config(path).get("max_position_embeddings")
    config = load_overrides(overrides, {"model": {"path": path}, "run": {"name": Path(path).resolve().name}}, "eval")
    room = None if positions is None else positions - config.rollout.max_new_tokens
    if room is None or room < 1 or "rollout.max_prompt_tokens" in overridden_keys(overrides):
        return config  # what does not fit is for the checks to say
    longest = min(config.rollout.max_prompt_tokens, room)
    return replace(config, rollout=replace(config.rollout, max_prompt_tokens=longest))
