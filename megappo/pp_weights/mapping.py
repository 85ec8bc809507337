"""Which slice of which Hugging Face tensor is which part of a rank's Megatron parameter? `Piece`s, from the family's rules.

Pure arithmetic plus two views: `Piece.local` of the parameter and `Piece.hf` of the HF tensor have one shape, so that `copy_`
either way is the whole conversion, bit for bit. Layer numbers are local to the chunk on Megatron's side and global on HF's.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megappo.errors import UserError
from megappo.models.families import rules_of
from megappo.models.families.rules import ParamRule
from megappo.models.shape import ModelShape
from megappo.parallel_state.layout import ParallelLayout
from megappo.parallel_state.splits import one_of

if TYPE_CHECKING:
    import torch

EMBEDDING_HF = "model.embed_tokens.weight"
TIED_COPY = ParamRule("output_layer.weight", (EMBEDDING_HF,), "vocab", "lm_head")
"""With tied embeddings and more than one stage, Megatron's last stage holds a copy of the embedding as its output layer."""


@dataclass(frozen=True)
class Piece:
    """One rectangle of an HF tensor and the part of a local parameter that equals it.

    HF side: [start, stop) along `dim` of `hf_name`, whose full shape is `hf_shape`. Local side: dim 0 of `param` is first cut
    into `split` sizes (if any), then [local_start, local_stop) is taken along `local_dim`.
    role: of several holders of the same values one is the "owner", whose values leave; the others are a "replica" (further tp
    ranks of a replicated tensor) or the "tied_copy" (the last stage's embedding).
    A piece may be empty (start == stop): a vocabulary shard that holds nothing but padding, or a qkv shard without a key.
    """

    param: str
    param_shape: tuple[int, ...]
    hf_name: str
    hf_shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    local_dim: int
    local_start: int
    local_stop: int
    split: tuple[int, ...] = ()
    role: Literal["owner", "replica", "tied_copy"] = "owner"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the HF slice."""
        return (*self.hf_shape[: self.dim], self.stop - self.start, *self.hf_shape[self.dim + 1 :])

    def local(self, param: torch.Tensor) -> torch.Tensor:
        """View of the parameter."""
        split: torch.Tensor = param.unflatten(0, self.split) if self.split else param  # type: ignore[no-untyped-call]
        return split.narrow(self.local_dim, self.local_start, self.local_stop - self.local_start)

    def hf(self, tensor: torch.Tensor) -> torch.Tensor:
        """View of the full HF tensor, with the shape of `local`."""
        return self.as_local(tensor.narrow(self.dim, self.start, self.stop - self.start))

    def as_local(self, hf_slice: torch.Tensor) -> torch.Tensor:
        """View of the HF slice alone (`shape`), with the shape of `local`."""
        if not self.split:
            return hf_slice
        sizes = (self.split[0], self.local_stop - self.local_start, self.split[2])
        as_local: torch.Tensor = hf_slice.unflatten(0, sizes)  # type: ignore[no-untyped-call]
        return as_local


def expected_hf_tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the complete model, layers in order."""
    tensors = {}
    for rule in rules_of(shape):
        for layer in range(shape.num_layers) if rule.part == "layer" else (0,):
            for name, size in zip(rule.hf, _hf_shapes(rule, shape), strict=True):
                tensors[name.format(layer=layer)] = size
    return tensors


def chunk_pieces(shape: ModelShape, layout: ParallelLayout, tp_rank: int, stage: int, chunk: int) -> list[Piece]:
    """All pieces of one chunk of one rank; every local parameter has at least one."""
    check_tensor_parallel(shape, layout)
    return [
        piece
        for rule, local_layer, layer in _rules_in_chunk(shape, layout, stage, chunk)
        for piece in rule_pieces(rule, shape, layout.tp, tp_rank, local_layer, layer)
    ]


def rule_pieces(rule: ParamRule, shape: ModelShape, tp: int, tp_rank: int, local_layer: int = 0, layer: int = 0) -> list[Piece]:
    """The pieces of one rule on one tensor-parallel rank: one for each of the rule's HF tensors."""
    param = rule.megatron.format(layer=local_layer)
    names = [name.format(layer=layer) for name in rule.hf]
    sizes = _hf_shapes(rule, shape)
    if rule.cut == "replicated":
        rows = sizes[0][0]
        return [Piece(param, sizes[0], names[0], sizes[0], 0, 0, rows, 0, 0, rows, role="replica" if tp_rank else "owner")]
    if rule.cut in ("column", "row"):
        dim = 0 if rule.cut == "column" else 1
        part = sizes[0][dim] // tp
        local_shape = (*sizes[0][:dim], part, *sizes[0][dim + 1 :])
        return [Piece(param, local_shape, names[0], sizes[0], dim, tp_rank * part, (tp_rank + 1) * part, dim, 0, part)]
    if rule.cut == "vocab":
        rows = shape.padded_vocab_size(tp) // tp
        start, stop = (min(bound * rows, shape.vocab_size) for bound in (tp_rank, tp_rank + 1))
        local_shape = (rows, *sizes[0][1:])
        role: Literal["owner", "tied_copy"] = "tied_copy" if rule is TIED_COPY else "owner"
        return [Piece(param, local_shape, names[0], sizes[0], 0, start, stop, 0, 0, stop - start, role=role)]
    if rule.cut == "gate_up":
        part = sizes[0][0] // tp
        local_shape = (2 * part, *sizes[0][1:])
        return [
            Piece(param, local_shape, name, size, 0, tp_rank * part, (tp_rank + 1) * part, 0, half * part, (half + 1) * part)
            for half, (name, size) in enumerate(zip(names, sizes, strict=True))
        ]
    if shape.num_kv_heads % tp:
        return _shared_group_pieces(param, names, sizes, shape, tp, tp_rank)
    groups = shape.num_kv_heads // tp  # query groups of this rank, each stored as (q .. q, k, v)
    queries = shape.num_heads // shape.num_kv_heads
    split = (groups, queries + 2, shape.head_dim)
    local_shape = (groups * (queries + 2) * shape.head_dim, *sizes[0][1:])
    slots = ((0, queries), (queries, queries + 1), (queries + 1, queries + 2))
    pieces = []
    for name, size, (first, last) in zip(names, sizes, slots, strict=True):
        rows = groups * (last - first) * shape.head_dim
        pieces.append(Piece(param, local_shape, name, size, 0, tp_rank * rows, (tp_rank + 1) * rows, 1, first, last, split))
    return pieces


def _shared_group_pieces(
    param: str, names: list[str], sizes: list[tuple[int, ...]], shape: ModelShape, tp: int, tp_rank: int
) -> list[Piece]:
    """The pieces of a fused qkv parameter where several tp ranks share a query group (fewer KV heads than tp).

    Megatron cuts the rows of the whole fused matrix into tp equal runs, across q, k and v and even through a head, and gathers
    the product before it uses it. So each row is on one rank. A run is part of one group, since the groups divide the ranks."""
    sharing = tp // shape.num_kv_heads
    group, place = divmod(tp_rank, sharing)
    heads = (shape.num_heads // shape.num_kv_heads, 1, 1)  # of q, k and v in a group
    run = sum(heads) * shape.head_dim // sharing
    local_shape = (run, *sizes[0][1:])
    pieces = []
    begin = -place * run  # where this kind's rows begin, counted from the first row of the run
    for name, size, count in zip(names, sizes, heads, strict=True):
        rows = count * shape.head_dim
        first, last = (min(max(bound, 0), run) for bound in (begin, begin + rows))
        start = group * rows + first - begin if first < last else 0
        pieces.append(Piece(param, local_shape, name, size, 0, start, start + last - first, 0, first, last))
        begin += rows
    return pieces


def check_tensor_parallel(shape: ModelShape, layout: ParallelLayout) -> None:
    """Raise UserError unless tp fits the model's heads and FFN rows."""
    if shape.num_layers != layout.num_layers:
        raise UserError(
            f"{layout.key} is a layout of {layout.num_layers} layers; the model has {shape.num_layers}: give the model's number"
        )
    if shape.num_heads % shape.num_kv_heads:
        raise UserError(
            f"config.json num_attention_heads={shape.num_heads} is not a multiple of num_key_value_heads={shape.num_kv_heads}"
        )
    if misfits := shape.tp_misfits(layout.tp):
        raise UserError(f"{layout.key}.tp={layout.tp} does not fit {' and '.join(misfits)}; use {one_of(shape.tp_degrees)}")


def _rules_in_chunk(shape: ModelShape, layout: ParallelLayout, stage: int, chunk: int) -> Iterator[tuple[ParamRule, int, int]]:
    """(rule, layer number in the chunk, global layer number) of every parameter in the chunk."""
    has_head = layout.holds_head(stage, chunk)
    for rule in rules_of(shape):
        if rule.part == "layer":
            yield from ((rule, local, layer) for local, layer in enumerate(layout.layers(stage, chunk)))
        elif layout.holds_embedding(stage, chunk) if rule.part == "embedding" else has_head:
            yield rule, 0, 0
    if has_head and shape.tied and shape.head == "lm" and layout.pp > 1:
        yield TIED_COPY, 0, 0


def _hf_shapes(rule: ParamRule, shape: ModelShape) -> list[tuple[int, ...]]:
    """Shapes of the rule's HF tensors, by the Megatron module that they feed."""
    hidden, queries, keys = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    module, kind = rule.megatron.split(".")[-2:]
    matrices: dict[str, list[tuple[int, ...]]] = {
        "word_embeddings": [(shape.vocab_size, hidden)],
        "output_layer": [(shape.vocab_size, hidden)],
        "value_head": [(1, hidden)],
        "linear_qkv": [(queries, hidden), (keys, hidden), (keys, hidden)],
        "linear_proj": [(hidden, queries)],
        "linear_fc1": [(shape.ffn_size, hidden)] * 2,
        "linear_fc2": [(hidden, shape.ffn_size)],
    }
    if module in ("q_layernorm", "k_layernorm"):
        return [(shape.head_dim,)]
    if module not in matrices:
        return [(hidden,)]  # the other norms
    return matrices[module] if kind == "weight" else [size[:1] for size in matrices[module]]
