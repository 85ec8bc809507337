"""Which models are handed over in the weight benchmarks, and with which values? Values follow from a tensor's name alone.

So any rank can tell, without a word to another, whether a complete tensor is right bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch

from megappo.models.gpt import GPTChunk, build_chunks
from megappo.models.shape import ModelShape
from megappo.parallel_state.groups import RoleGroups, create_role_groups
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.mapping import chunk_pieces, expected_hf_tensors
from megappo.pp_weights.naming import get_all_params

DTYPE = torch.bfloat16


def _llama(num_layers: int, hidden_size: int, ffn_size: int, num_heads: int, num_kv_heads: int, vocab_size: int) -> ModelShape:
    return ModelShape(
        family="llama",
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_size=ffn_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        vocab_size=vocab_size,
        tied=False,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        max_positions=1024,
    )


# Vocabularies that Megatron does not pad: one of the peers hands padding over as if it were weights.
SMALL = _llama(num_layers=24, hidden_size=256, ffn_size=768, num_heads=8, num_kv_heads=4, vocab_size=16_384)  # 219 tensors
LARGE = _llama(num_layers=8, hidden_size=1024, ffn_size=2816, num_heads=16, num_kv_heads=8, vocab_size=32_000)  # 75 tensors


def num_bytes(shape: ModelShape) -> int:
    return shape.num_parameters * DTYPE.itemsize


def four_ranks(shape: ModelShape) -> RoleGroups:
    """Groups of tp2 x pp2 x vpp2. Called by all four ranks."""
    return create_role_groups({"actor": ParallelLayout(shape.num_layers, tp=2, pp=2, vpp=2)}, seed=1)["actor"]


def build_stamped(shape: ModelShape, groups: RoleGroups) -> list[GPTChunk]:
    """This rank's Megatron chunks in bfloat16, every parameter stamped. Called inside `groups.active()`."""
    chunks = build_chunks(shape, groups, DTYPE)
    stamp(chunks, shape, groups.layout, groups.rank)
    return chunks


@torch.no_grad()
def stamp(chunks: Sequence[torch.nn.Module], shape: ModelShape, layout: ParallelLayout, rank: int) -> None:
    own = layout.coordinates(rank)
    for chunk, params in enumerate(get_all_params(chunks)):
        for piece in chunk_pieces(shape, layout, own.tp, own.pp, chunk):
            piece.local(params[piece.param]).copy_(piece.hf(stamped(piece.hf_name, piece.hf_shape)))


def stamped(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The complete tensor of this name: any bit pattern, NaNs and all."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(DTYPE)


def assert_complete(found: Iterable[tuple[str, torch.Tensor]], shape: ModelShape, who: str) -> None:
    """Every tensor of the model, each once, each bit for bit."""
    missing = expected_hf_tensors(shape)
    for name, tensor in found:
        size = missing.pop(name, None)
        assert size is not None, f"{who}: {name} comes twice or is unknown"
        assert same_bits(tensor, stamped(name, size)), f"{who}: {name} is wrong"
    assert not missing, f"{who}: missing {sorted(missing)[:5]}"


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal shape, dtype and bits: NaN equals itself."""
    return left.dtype == right.dtype and torch.equal(left.contiguous().view(torch.int16), right.contiguous().view(torch.int16))
