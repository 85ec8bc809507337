"""Llama 2 and 3 (and SmolLM2): grouped-query attention without biases; Llama 3.1 and later scale their rotary positions."""

from __future__ import annotations

from typing import Any

from megappo.models.families.decoder import DECODER, decoder_shape
from megappo.models.shape import ModelShape

ARCHITECTURE = "LlamaForCausalLM"
RULES = DECODER


def shape_from_hf(config: dict[str, Any]) -> ModelShape:
    return decoder_shape(config, "llama")
