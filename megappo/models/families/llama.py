"""Llama 2 and 3 (and SmolLM2): RMSNorm, SwiGLU, rotary positions, grouped-query attention, no biases."""

from __future__ import annotations

from typing import Any

from megappo.errors import UserError
from megappo.models.families.rules import ParamRule
from megappo.models.shape import ModelShape

ARCHITECTURES = ("LlamaForCausalLM",)

RULES = (
    ParamRule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab", "embedding"),
    ParamRule("decoder.layers.{layer}.input_layernorm.weight", ("model.layers.{layer}.input_layernorm.weight",), "replicated"),
    ParamRule(
        "decoder.layers.{layer}.self_attention.linear_qkv.weight",
        (
            "model.layers.{layer}.self_attn.q_proj.weight",
            "model.layers.{layer}.self_attn.k_proj.weight",
            "model.layers.{layer}.self_attn.v_proj.weight",
        ),
        "qkv",
    ),
    ParamRule(
        "decoder.layers.{layer}.self_attention.linear_proj.weight", ("model.layers.{layer}.self_attn.o_proj.weight",), "row"
    ),
    ParamRule(
        "decoder.layers.{layer}.pre_mlp_layernorm.weight", ("model.layers.{layer}.post_attention_layernorm.weight",), "replicated"
    ),
    ParamRule(
        "decoder.layers.{layer}.mlp.linear_fc1.weight",
        ("model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"),
        "gate_up",
    ),
    ParamRule("decoder.layers.{layer}.mlp.linear_fc2.weight", ("model.layers.{layer}.mlp.down_proj.weight",), "row"),
    ParamRule("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated", "final_norm"),
    ParamRule("output_layer.weight", ("lm_head.weight",), "vocab", "lm_head"),
    ParamRule("value_head.weight", ("score.weight",), "replicated", "value_head"),
)


def shape_from_hf(config: dict[str, Any]) -> ModelShape:
    """Sizes from a Llama `config.json`. Raises UserError for what this family does not do yet."""
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UserError(f"config.json {key}=true is not supported for Llama yet; use a model without biases")
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type != "default":
        raise UserError(f"config.json rope_type={rope_type!r} is not supported yet; use a model with unscaled rotary positions")
    heads = config["num_attention_heads"]
    return ModelShape(
        family="llama",
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_size=config["intermediate_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        max_positions=config["max_position_embeddings"],
    )
