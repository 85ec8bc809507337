"""Mistral: as Llama, with attention to the last `sliding_window` tokens only where config.json gives a window."""

from __future__ import annotations

from typing import Any

from megappo.models.families.decoder import DECODER, decoder_shape
from megappo.models.shape import ModelShape

ARCHITECTURE = "MistralForCausalLM"
RULES = DECODER


def shape_from_hf(config: dict[str, Any]) -> ModelShape:
    return decoder_shape(
        config,
        "mistral",
        num_kv_heads=config.get("num_key_value_heads") or 8,
        sliding_window=config.get("sliding_window", 4096),  # a window, too, where the key is absent; null is none
    )
