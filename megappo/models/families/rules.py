"""How does a family say which Hugging Face tensors a Megatron parameter is made of? `ParamRule`. No torch.

A rule names one Megatron parameter (with `{layer}` for the layer's number), the Hugging Face tensors it is made of, and the way
in which it is cut over the tensor-parallel ranks. `pp_weights/mapping.py` turns rules into slices, in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Cut = Literal["replicated", "column", "row", "vocab", "qkv", "gate_up"]
"""replicated  every tp rank holds the whole tensor
column      rows (dim 0) are cut over tp
row         columns (dim 1) are cut over tp
vocab       rows are cut over tp after padding the vocabulary
qkv         query groups are cut over tp; each group is stored as (q .. q, k, v); three HF tensors: q, k, v
gate_up     each tp shard is [gate_r | up_r]; two HF tensors: gate, up"""


@dataclass(frozen=True)
class ParamRule:
    """One Megatron parameter and the HF tensors it is made of. `{layer}` stands for the global layer number (HF side)
    and for the number inside the chunk (Megatron side)."""

    megatron: str
    hf: tuple[str, ...]
    cut: Cut
    part: Literal["embedding", "layer", "final_norm", "lm_head", "value_head"] = "layer"
    only_with: Literal["qkv_bias", "proj_bias", "mlp_bias"] | None = None
    """The field of ModelShape without which a model has no such parameter."""
