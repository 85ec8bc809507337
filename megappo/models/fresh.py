"""How does a model start without weights? `fill_fresh`: random ones, the same whatever the layout."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from megappo.models.gpt import GPTChunk
from megappo.models.shape import ModelShape
from megappo.parallel_state.groups import RoleGroups
from megappo.pp_weights.mapping import chunk_pieces
from megappo.pp_weights.naming import get_all_params
from megappo.pp_weights.offload import require_memory

_SCORE = "score.weight"


@torch.no_grad()
def fill_fresh(chunks: Sequence[GPTChunk], groups: RoleGroups, seed: int) -> None:
    """Fill this rank's chunks with random weights. Parameters keep their dtype and place; nothing is sent between ranks.

    Each tensor of the whole model is drawn on the host from its seed and complete name alone (`fresh_tensor`), and the rank keeps
    its slice: layouts differ in nothing. One whole tensor is held at a time. Rows of vocabulary padding become 0."""
    shape = chunks[0].shape
    for number, chunk in enumerate(chunks):
        require_memory(chunk.named_parameters(), "fresh weights are not drawn")
        params = get_all_params([chunk])[0]
        for param in params.values():
            param.zero_()
        for piece in chunk_pieces(shape, groups.layout, groups.coordinates.tp, groups.coordinates.pp, number):
            if piece.start < piece.stop:
                piece.local(params[piece.param]).copy_(piece.hf(fresh_tensor(piece.hf_name, piece.hf_shape, shape, seed)))


def fresh_tensor(name: str, size: tuple[int, ...], shape: ModelShape, seed: int) -> Tensor:
    """One whole float32 tensor, `name` as in a Hugging Face folder: what transformers gives these families (its `_init_weights`
    for Llama, Mistral and Qwen).

    Matrices and the embedding are normal with mean 0 and config.json's initializer_range as deviation (0.02 where it has none:
    GPT-2's, Radford et al., 2019), norms are 1, biases 0. Unlike there a value head is 0, as it is on a language model: the first
    values are 0 for every token, not noise, and the critic's first update moves the head alone."""
    if name == _SCORE or name.endswith(".bias"):
        return torch.zeros(size)
    if len(size) == 1:
        return torch.ones(size)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))  # torch heeds 32 bits of a seed
    return torch.empty(size).normal_(0.0, shape.initializer_range, generator=generator)
