"""Norm, rotary positions and attention for megatron's local layer spec: what it lacks to train packed batches anywhere.

Megatron's own local parts refuse sequence parallel (norm) and packed sequences (attention), and its rotary embedding ignores
positions. These three take their place; they run on the CPU and on GPUs without TransformerEngine.

A pack is a row of sequences one behind the other. What says where they begin travels in the place of the attention mask, since
megatron hands that through to the attention untouched: an int64 vector of sequence lengths (packed, batch 1), or a bool mask
(b, s) of the real tokens (padded).

legend: s tokens, b batch, h query heads, g KV heads, d head dimension
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megappo.models.shape import ModelShape

_LARGEST_PADDING_SHARE = 0.25


class RMSNorm(nn.Module):
    """Root-mean-square norm (arXiv:1910.07467); its gradient is reduced by megatron where the sequence is cut over tp."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: object) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class PositionRotary(nn.Module):
    """Rotary embedding (arXiv:2104.09864) from explicit positions, which `GPTChunk.forward` sets before each pass."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.inv_freq = rotary_frequencies(shape)
        self.positions: Tensor | None = None

    def get_rotary_seq_len(self, *args: object, **kwargs: object) -> int:
        return 0  # megatron asks before it calls; the positions say it all

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """(s, b, 1, d) angles for positions (b, s)."""
        assert self.positions is not None
        angles = self.positions.t().unsqueeze(-1).float() * self.inv_freq.to(self.positions.device)
        return torch.cat((angles, angles), dim=-1).unsqueeze(2)


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """(d / 2,) float32 angles a position, theta^(-2i/d), stretched as the model's `rope_scaling` says.

    linear: all divided by the factor (arXiv:2306.15595). llama3 (Llama 3.1's rule): waves longer than original / low_freq_factor
    positions are divided by the factor, those shorter than original / high_freq_factor stay, those between go over linearly."""
    frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
    scaling = shape.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)  # waves that fit into the original context
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)


@lru_cache(maxsize=256)
def _length_groups(lengths: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Sequences of similar length, to run as one padded batch: pairs (index (n, longest), valid (n, longest)).

    Padded slots repeat the sequence's last token: behind a causal mask no real token sees them."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    groups: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if lengths[i] == 0:
            continue
        if groups and lengths[i] >= lengths[groups[-1][0]] * (1 - _LARGEST_PADDING_SHARE):
            groups[-1].append(i)
        else:
            groups.append([i])
    out = []
    for group in groups:
        slots = torch.arange(lengths[group[0]])
        size = torch.tensor([lengths[i] for i in group]).unsqueeze(1)
        start = torch.tensor([starts[i] for i in group]).unsqueeze(1)
        out.append((start + torch.minimum(slots, size - 1), slots < size))
    return out


class CausalAttention(nn.Module):
    """Causal grouped-query attention over packed or padded sequences, through torch's scaled_dot_product_attention.

    config.window_size: (tokens seen to the left, 0) where the model has a sliding window, else None."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **kwargs: object) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.window = None if config.window_size is None else config.window_size[0] + 1

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, *args: object, **kwargs: object
    ) -> Tensor:
        """query (s, b, h, d), key and value (s, b, g, d) -> (s, b, h * d)."""
        if attention_mask.dtype == torch.bool:
            return self._padded(query, key, value, attention_mask)
        return self._packed(query.squeeze(1), key.squeeze(1), value.squeeze(1), tuple(attention_mask.tolist())).unsqueeze(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q (n, h, s, d), k and v (n, g, s, d) -> (n, h, s, d)."""
        dtype = q.dtype
        if q.device.type == "cpu":  # torch's CPU kernel is up to three times slower backward in bfloat16 than in float32
            q, k, v = q.float(), k.float(), v.float()
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        ).to(dtype)

    def _visible(self, s: int, device: torch.device) -> Tensor:
        """(s, s) bool: which keys (columns) a query (row) sees."""
        causal = torch.ones(s, s, dtype=torch.bool, device=device).tril()
        return causal if self.window is None else causal.triu(1 - self.window)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor) -> Tensor:
        s = query.shape[0]
        allowed = self._visible(s, query.device) & real[:, None, None, :]
        allowed = allowed | torch.eye(s, dtype=torch.bool, device=query.device)  # a padding row must see something, or it is NaN
        out = self._attend(query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), allowed)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """query (t, h, d), key and value (t, g, d) -> (t, h * d)."""
        rows, order = [], []
        for index, valid in _length_groups(lengths):
            index, valid = index.to(query.device), valid.to(query.device)
            q, k, v = (x[index].transpose(1, 2) for x in (query, key, value))
            longest = index.shape[1]
            band = self._visible(longest, query.device) if self.window is not None and longest > self.window else None
            out = self._attend(q, k, v, band).transpose(1, 2).flatten(2)  # (n, longest, h * d)
            rows.append(out[valid])
            order.append(index[valid])
        back = torch.empty(query.shape[0], dtype=torch.long, device=query.device)
        back[torch.cat(order)] = torch.arange(query.shape[0], device=query.device)
        return torch.cat(rows)[back]
