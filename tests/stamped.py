"""How do tests see that each row of a model came to where it belongs? Folders without two equal rows, compared byte by byte.

`merge` puts Megatron's shards together again without our mapping: the right way is a second opinion, the wrong ways are those
that others have shipped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

Named = dict[str, torch.Tensor]
DTypes = Literal["float32", "bfloat16", "mixed"]
"""mixed: bfloat16, vectors (norms, biases, buffers) float32"""

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
BUFFER = "model.layers.{layer}.mlp.gate.e_score_correction_bias"
"""A tensor that is a buffer in Megatron, as a mixture of experts has one. No family has it yet; tests add the rule."""


def hf_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor, as transformers' modules of this `config.json` have them."""
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    rows = {"q": config["num_attention_heads"] * head_dim}
    rows |= dict.fromkeys("kv", config["num_key_value_heads"] * head_dim)
    family = config["architectures"][0]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes[f"{at}.input_layernorm.weight"] = shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        for name, size in rows.items():
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (size, hidden)
            if family.startswith("Qwen2") or config.get("attention_bias"):
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (size,)
        if family.startswith("Qwen3"):
            shapes[f"{at}.self_attn.q_norm.weight"] = shapes[f"{at}.self_attn.k_norm.weight"] = (head_dim,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, rows["q"])
        shapes[f"{at}.mlp.gate_proj.weight"] = shapes[f"{at}.mlp.up_proj.weight"] = (ffn, hidden)
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, ffn)
        if config.get("attention_bias"):
            shapes[f"{at}.self_attn.o_proj.bias"] = (hidden,)
        if config.get("mlp_bias"):
            shapes[f"{at}.mlp.gate_proj.bias"] = shapes[f"{at}.mlp.up_proj.bias"] = (ffn,)
            shapes[f"{at}.mlp.down_proj.bias"] = (hidden,)
        if config.get("has_buffer"):
            shapes[BUFFER.format(layer=layer)] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if family.endswith("ForSequenceClassification"):
        shapes["score.weight"] = (1, hidden)
    elif not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def stamped_folder(folder: Path, layers: int, dtypes: DTypes, **own: Any) -> Path:
    """A Hugging Face folder whose rows (and elements of vectors) are all different, whatever tensor and layer they are of."""
    config = BASE | own | {"num_hidden_layers": layers}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors, rows = {}, 1
    for name, shape in hf_shapes(config).items():
        narrow = dtypes == "bfloat16" or (dtypes == "mixed" and len(shape) > 1)
        tensors[name] = stamp(rows, shape, torch.bfloat16 if narrow else torch.float32)
        rows += shape[0]
    save_file(tensors, folder / "model.safetensors")
    return folder


def stamp(first_row: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose rows have the numbers first_row, first_row + 1, ...; they are its first column, the others tell the columns.

    In bfloat16 bit patterns are counted, not numbers: 32,640 of them are finite and positive."""
    row = torch.arange(first_row, first_row + shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    column = torch.arange(shape[1]) if len(shape) > 1 else torch.zeros(1, dtype=torch.long)
    if dtype == torch.float32:
        assert (first_row + shape[0]) * 1024 < 2**24 and math.prod(shape[1:]) <= 1024
        return (row * 1024 + column).reshape(shape).float()
    assert first_row + shape[0] < 32640
    pattern = torch.where(column == 0, row, row * 31 + column * 1009) % 32640
    return pattern.reshape(shape).to(torch.int16).view(torch.bfloat16)


def differences(got: Named, folder: Path) -> list[str]:
    """The check: names that are missing, unexpected, or whose dtype, shape or bytes are not the folder's."""
    want = load_file(folder / "model.safetensors")
    wrong = sorted(got.keys() ^ want.keys())
    for name in sorted(got.keys() & want.keys()):
        a, b = got[name].contiguous(), want[name]
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            wrong.append(name)
    return wrong


Parts = Sequence[Sequence[Sequence[Named]]]
"""[stage][chunk][tp rank]{name inside the chunk: shard}"""

_PLAIN = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}


def merge(
    parts: Parts,
    folder: Path,
    *,
    numbers: Literal["chunk_major", "rank_major", "local"] = "chunk_major",
    qkv: Literal["groups", "thirds"] = "groups",
    gated: Literal["shards", "halves"] = "shards",
) -> Named:
    """Complete HF tensors from every rank's shards, by the right rules or by one that is wrong."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    cells = [(stage, chunk) for stage in range(len(parts)) for chunk in range(len(parts[0]))]
    if numbers == "chunk_major":
        cells.sort(key=lambda cell: cell[::-1])
    merged: Named = {}
    start = 0
    for stage, chunk in cells:
        ranks = parts[stage][chunk]
        for name in ranks[0]:
            shards = [rank[name] for rank in ranks]
            if not name.startswith("decoder.layers."):
                merged |= _outside(name, shards, config)
                continue
            number, inner = name.removeprefix("decoder.layers.").split(".", 1)
            module, kind = inner.rsplit(".", 1)
            at = f"model.layers.{start + int(number)}"
            if module == "self_attention.linear_qkv":
                merged |= {f"{at}.self_attn.{x}_proj.{kind}": t for x, t in _qkv(torch.cat(shards), config, qkv).items()}
            elif module == "mlp.linear_fc1":
                halves = [shard.chunk(2) for shard in shards]
                gate, up = (torch.cat([half[i] for half in halves]) for i in (0, 1))
                if gated == "halves":
                    gate, up = torch.cat(shards).chunk(2)
                merged |= {f"{at}.mlp.gate_proj.{kind}": gate, f"{at}.mlp.up_proj.{kind}": up}
            else:
                is_cut = module in ("self_attention.linear_proj", "mlp.linear_fc2") and kind == "weight"
                merged[f"{at}.{_PLAIN[module]}.{kind}"] = torch.cat(shards, 1) if is_cut else shards[0]
        if numbers != "local":
            start += len({name.split(".")[2] for name in ranks[0] if name.startswith("decoder.layers.")})
    return merged


def _outside(name: str, shards: list[torch.Tensor], config: dict[str, Any]) -> Named:
    """What is not part of a layer. With tied embeddings the last stage's copy is left out."""
    vocab = config["vocab_size"]
    if name == "embedding.word_embeddings.weight":
        return {"model.embed_tokens.weight": torch.cat(shards)[:vocab]}
    if name == "output_layer.weight":
        return {} if config["tie_word_embeddings"] else {"lm_head.weight": torch.cat(shards)[:vocab]}
    return {{"decoder.final_layernorm.weight": "model.norm.weight", "value_head.weight": "score.weight"}[name]: shards[0]}


def _qkv(fused: torch.Tensor, config: dict[str, Any], how: str) -> Named:
    if how == "thirds":
        return dict(zip("qkv", fused.chunk(3), strict=True))
    groups = fused.unflatten(0, (config["num_key_value_heads"], -1, config["head_dim"]))
    return {x: part.flatten(0, 2) for x, part in zip("qkv", (groups[:, :-2], groups[:, -2:-1], groups[:, -1:]), strict=True)}
