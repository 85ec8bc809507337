"""How do weight tests get a whole model's chunks without Megatron? Modules with Megatron's names, every element stamped."""

from __future__ import annotations

import torch

from megappo.models.shape import ModelShape
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.mapping import chunk_pieces, expected_hf_tensors


def make_shape(
    layers: int = 4, heads: int = 4, kv_heads: int = 2, head_dim: int = 4, vocab: int = 61, tied: bool = False, head: str = "lm"
) -> ModelShape:
    return ModelShape("llama", layers, 8, 12, heads, kv_heads, head_dim, vocab, tied, 1e-5, 1e4, 64, head)


def stamped_hf(shape: ModelShape, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Complete HF tensors; no two elements of the model are equal (exact in float32 up to 16 million elements)."""
    tensors = {}
    start = 1
    for name, size in expected_hf_tensors(shape).items():
        tensors[name] = torch.arange(start, start + torch.Size(size).numel()).reshape(size).to(dtype)
        start += tensors[name].numel()
    return tensors


class FakeChunk(torch.nn.Module):
    """A module whose parameters have the given dotted names."""

    def __init__(self, params: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for path, tensor in params.items():
            module: torch.nn.Module = self
            *parents, leaf = path.split(".")
            for part in parents:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]  # type: ignore[assignment]
            module.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))


def chunk_params(
    shape: ModelShape, layout: ParallelLayout, tp: int, stage: int, chunk: int, hf: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """One chunk's parameters, cut from the complete tensors; vocabulary padding is -1, so that an exported padding row shows."""
    pieces = chunk_pieces(shape, layout, tp, stage, chunk)
    params = {p.param: torch.full(p.param_shape, -1, dtype=hf[p.hf_name].dtype) for p in pieces}
    for piece in pieces:
        piece.local(params[piece.param]).copy_(piece.hf(hf[piece.hf_name]))
    return params


def rank_chunks(shape: ModelShape, layout: ParallelLayout, rank: int, hf: dict[str, torch.Tensor]) -> list[FakeChunk]:
    own = layout.coordinates(rank)
    return [FakeChunk(chunk_params(shape, layout, own.tp, own.pp, chunk, hf)) for chunk in range(layout.vpp)]
