"""What sizes does the model have? `ModelShape`, read from a Hugging Face `config.json`. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megappo.errors import UserError

CHECKPOINT_FILE = "checkpoint.json"
"""What tells a megappo checkpoint from other folders (see checkpoint/format.py)."""
LATEST = "latest"
"""Beside the step folders of a run: a text file with the name of the newest complete one."""
_WHAT_TO_GIVE = "give a Hugging Face folder (config.json + safetensors) or a megappo checkpoint"

Head = Literal["lm", "value"]
"""Vocabulary logits, or one scalar a token (critic, reward model)."""


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts; `models/layers.py` has the formulas."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0


@dataclass(frozen=True)
class ModelShape:
    """Sizes and parts of a decoder-only transformer, in Hugging Face's terms.

    vocab_size is the tokenizer-facing size, without Megatron's padding. qkv_bias, proj_bias, mlp_bias: on q, k and v; on o; on
    gate, up and down. qk_norm: an RMSNorm on each query and key head.
    sliding_window: a token sees itself and the window - 1 tokens before it; None: all before it.
    initializer_range: standard deviation of the matrices of a model that starts from random weights.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    norm_eps: float
    rope_theta: float
    max_positions: int
    head: Head = "lm"
    qkv_bias: bool = False
    proj_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    initializer_range: float = 0.02

    def padded_vocab_size(self, tp: int, divisor: int = 32) -> int:
        """Rows of the embedding in Megatron: ceil(V / (divisor * tp)) * divisor * tp, as megatron pads it."""
        multiple = divisor * tp
        return -(-self.vocab_size // multiple) * multiple

    def tp_misfits(self, tp: int) -> list[str]:
        """Sizes, as `name=value` of config.json, that tensor parallelism of degree tp cannot cut; empty: it fits.

        Query heads and FFN rows are dealt out whole. KV heads are, too, or several ranks share one; then the rows of the fused
        qkv matrix must come out even, whatever heads they belong to."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        misfits = {f"num_attention_heads={heads}": heads % tp}
        if kv_heads % tp:
            misfits[f"num_key_value_heads={kv_heads}"] = tp % kv_heads
            if tp % kv_heads == 0:
                misfits[f"head_dim={self.head_dim}"] = (heads + 2 * kv_heads) * self.head_dim % tp
        misfits[f"intermediate_size={self.ffn_size}"] = self.ffn_size % tp
        return [size for size, rest in misfits.items() if rest]

    @property
    def tp_degrees(self) -> list[int]:
        """The tensor-parallel degrees that fit."""
        return [tp for tp in range(1, self.num_heads + 1) if not self.tp_misfits(tp)]

    @property
    def num_parameters(self) -> int:
        """Parameters of the full model, tied weights counted once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * q + 2 * kv + 3 * self.ffn_size + 2)
        layer += (q + 2 * kv) * self.qkv_bias + self.hidden_size * self.proj_bias
        layer += (2 * self.ffn_size + self.hidden_size) * self.mlp_bias + 2 * self.head_dim * self.qk_norm
        head = self.hidden_size if self.head == "value" else (0 if self.tied else self.vocab_size * self.hidden_size)
        return self.vocab_size * self.hidden_size + self.num_layers * layer + self.hidden_size + head


def checkpoint_folder(path: str | Path) -> Path | None:
    """The megappo checkpoint that a model path stands for, or None for another kind of folder. A step folder of a run
    (`checkpoints/step_000100`) stands for its actor, and the file `checkpoints/latest` for the step that it names."""
    path = Path(path)
    if path.name == LATEST and path.is_file():
        path = path.parent / path.read_text(encoding="utf-8").strip()
    for folder in (path, path / "actor"):
        if (folder / CHECKPOINT_FILE).is_file():
            return folder
    return None


def hf_files(path: str | Path) -> Path:
    """The folder with config.json, tokenizer and generation config of a model path: a Hugging Face folder itself, or the `hf/` of
    a checkpoint. It need not exist."""
    checkpoint = checkpoint_folder(path)
    return Path(path) if checkpoint is None else checkpoint / "hf"


def read_hf_config(path: str | Path) -> dict[str, Any]:
    """`config.json` of a Hugging Face folder or a checkpoint. Raises UserError where the folder or the file is missing or
    broken."""
    checkpoint = checkpoint_folder(path)
    if checkpoint is None and not Path(path).is_dir():
        raise UserError(f"model.path={str(path)!r} is not a folder; {_WHAT_TO_GIVE}")
    file = hf_files(path) / "config.json"
    if not file.is_file():
        raise UserError(f"model.path={str(path)!r} has no {file.relative_to(checkpoint or path)}; {_WHAT_TO_GIVE}")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error}); copy the file again from the model's source") from None
    if not isinstance(config, dict):
        raise UserError(f"{file}: holds a {type(config).__name__}, not an object; copy the file again from the model's source")
    return config
