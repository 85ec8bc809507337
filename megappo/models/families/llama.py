"""Llama 2 and 3 (and SmolLM2): Llama 3.1 and later scale their rotary positions. Attention and MLP may have biases."""

from __future__ import annotations

from typing import Any

from megappo.models.families.decoder import BIASES, DECODER, decoder_shape
from megappo.models.shape import ModelShape

ARCHITECTURE = "LlamaForCausalLM"
RULES = DECODER + BIASES


def shape_from_hf(config: dict[str, Any]) -> ModelShape:
    return decoder_shape(config, "llama", bias_keys=("attention_bias", "mlp_bias"))
