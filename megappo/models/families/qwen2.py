"""Qwen2 and Qwen2.5: biases on queries, keys and values; the small ones tie their embeddings."""

from __future__ import annotations

from typing import Any

from megappo.models.families.decoder import BIASES, DECODER, decoder_shape, no_sliding_layers
from megappo.models.shape import ModelShape

ARCHITECTURE = "Qwen2ForCausalLM"
RULES = DECODER + BIASES


def shape_from_hf(config: dict[str, Any]) -> ModelShape:
    no_sliding_layers(config)
    return decoder_shape(config, "qwen2", num_kv_heads=config.get("num_key_value_heads") or 32, qkv_bias=True)
