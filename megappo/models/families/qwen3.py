"""Qwen3 (dense): an RMSNorm on each query and key head, and a head dimension of its own."""

from __future__ import annotations

from typing import Any

from megappo.models.families.decoder import DECODER, QK_NORM, decoder_shape, no_sliding_layers
from megappo.models.shape import ModelShape

ARCHITECTURE = "Qwen3ForCausalLM"
RULES = DECODER + QK_NORM


def shape_from_hf(config: dict[str, Any]) -> ModelShape:
    no_sliding_layers(config)
    return decoder_shape(
        config,
        "qwen3",
        num_kv_heads=config.get("num_key_value_heads") or 32,
        head_dim=config.get("head_dim") or 128,
        qk_norm=True,
    )
