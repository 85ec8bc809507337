"""What have all families in common? The parameters of a pre-norm decoder with SwiGLU, and the keys of `config.json`. No torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from megappo.errors import UserError
from megappo.models.families.rules import ParamRule
from megappo.models.shape import ModelShape, RopeScaling

_LAYER, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."
_QKV = tuple(f"{_HF}self_attn.{name}_proj" for name in "qkv")

DECODER = (
    ParamRule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab", "embedding"),
    ParamRule(f"{_LAYER}input_layernorm.weight", (f"{_HF}input_layernorm.weight",), "replicated"),
    ParamRule(f"{_LAYER}self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in _QKV), "qkv"),
    ParamRule(f"{_LAYER}self_attention.linear_proj.weight", (f"{_HF}self_attn.o_proj.weight",), "row"),
    ParamRule(f"{_LAYER}pre_mlp_layernorm.weight", (f"{_HF}post_attention_layernorm.weight",), "replicated"),
    ParamRule(f"{_LAYER}mlp.linear_fc1.weight", (f"{_HF}mlp.gate_proj.weight", f"{_HF}mlp.up_proj.weight"), "gate_up"),
    ParamRule(f"{_LAYER}mlp.linear_fc2.weight", (f"{_HF}mlp.down_proj.weight",), "row"),
    ParamRule("decoder.final_layernorm.weight", ("model.norm.weight",), "replicated", "final_norm"),
    ParamRule("output_layer.weight", ("lm_head.weight",), "vocab", "lm_head"),
    ParamRule("value_head.weight", ("score.weight",), "replicated", "value_head"),
)
_GATE_UP_BIAS = (f"{_HF}mlp.gate_proj.bias", f"{_HF}mlp.up_proj.bias")
BIASES = (  # those of the row-cut layers are added to the sum over tp, so every rank holds them whole
    ParamRule(f"{_LAYER}self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in _QKV), "qkv", only_with="qkv_bias"),
    ParamRule(f"{_LAYER}self_attention.linear_proj.bias", (f"{_HF}self_attn.o_proj.bias",), "replicated", only_with="proj_bias"),
    ParamRule(f"{_LAYER}mlp.linear_fc1.bias", _GATE_UP_BIAS, "gate_up", only_with="mlp_bias"),
    ParamRule(f"{_LAYER}mlp.linear_fc2.bias", (f"{_HF}mlp.down_proj.bias",), "replicated", only_with="mlp_bias"),
)
QK_NORM = tuple(
    ParamRule(f"{_LAYER}self_attention.{x}_layernorm.weight", (f"{_HF}self_attn.{x}_norm.weight",), "replicated") for x in "qk"
)


def decoder_shape(config: dict[str, Any], family: str, *, bias_keys: Collection[str] = (), **own: Any) -> ModelShape:
    """Sizes from a `config.json`; `own`: what the family fixes itself (its defaults for absent keys, its extra parts).
    bias_keys: which of attention_bias (on q, k, v, o) and mlp_bias (on gate, up, down) the family heeds.
    Raises UserError for what no family here does, KeyError for a key that must be there."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"config.json hidden_act={activation!r} is not supported; use a model with silu")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key) and key not in bias_keys:
            raise UserError(f"config.json {key}=true is not supported for {family}; use a model without it")
    heads = config["num_attention_heads"]
    sizes = {
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "qkv_bias": bool(config.get("attention_bias")),
        "proj_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "initializer_range": config.get("initializer_range", 0.02),
    }
    theta, scaling = _rope(config)
    return ModelShape(
        family=family,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_size=config["intermediate_size"],
        num_heads=heads,
        vocab_size=config["vocab_size"],
        rope_theta=theta,
        rope_scaling=scaling,
        max_positions=config["max_position_embeddings"],
        **(sizes | own),
    )


def no_sliding_layers(config: dict[str, Any]) -> None:
    """Raise UserError for a Qwen model some of whose layers see a window only (none of the released ones ask for it)."""
    if config.get("use_sliding_window") and config.get("max_window_layers", 0) < config["num_hidden_layers"]:
        raise UserError(
            "config.json use_sliding_window=true is not supported for Qwen; set it to false where no sequence is longer than "
            "sliding_window"
        )


def _rope(config: dict[str, Any]) -> tuple[float, RopeScaling | None]:
    """(base, scaling) from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    found = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(found.get("rope_theta") or config.get("rope_theta") or 10000.0)
    partial = found.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UserError(f"config.json partial_rotary_factor={partial} is not supported; use a model that rotates whole heads")
    kind = found.get("rope_type") or found.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", float(found["factor"]))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            float(found["factor"]),
            float(found["low_freq_factor"]),
            float(found["high_freq_factor"]),
            int(found.get("original_max_position_embeddings") or config["max_position_embeddings"]),
        )
    raise UserError(
        f"config.json rope_type={kind!r} is not supported; use a model with default, linear or llama3 positions "
        f"(a yarn entry that was added for longer contexts can be taken out again)"
    )
