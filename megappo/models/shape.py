"""What sizes does the model have? `ModelShape`, read from a Hugging Face `config.json`. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.errors import UserError


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer, in Hugging Face's terms.

    vocab_size is the tokenizer-facing size, without Megatron's padding. head is "lm" (vocabulary logits) or
    "value" (one scalar a token, for the critic).
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
    head: str = "lm"

    def padded_vocab_size(self, tp: int, divisor: int = 32) -> int:
        """Rows of the embedding in Megatron: ceil(V / (divisor * tp)) * divisor * tp, as megatron pads it."""
        multiple = divisor * tp
        return -(-self.vocab_size // multiple) * multiple

    @property
    def num_parameters(self) -> int:
        """Parameters of the full model, tied weights counted once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * q + 2 * kv + 3 * self.ffn_size + 2)
        head = self.hidden_size if self.head == "value" else (0 if self.tied else self.vocab_size * self.hidden_size)
        return self.vocab_size * self.hidden_size + self.num_layers * layer + self.hidden_size + head


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """`config.json` of a Hugging Face folder. Raises UserError where the folder or the file is missing or broken."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"model.path={str(folder)!r} is not a folder; give a Hugging Face folder (config.json + safetensors)")
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"model.path={str(folder)!r} has no config.json; give a Hugging Face folder (config.json + safetensors)")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); copy the file again from the model's source") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: holds a {type(config).__name__}, not an object; copy the file again from the model's source")
    return config
