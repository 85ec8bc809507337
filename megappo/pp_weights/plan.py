"""Which rank writes which slice to which byte of which bucket? `TransferPlan`: made once, from sizes alone. No torch.

A target is what one rank receives: with `gather: full` there is one, with complete tensors; with `gather: pp` one for each tp
rank, with that rank's shard of every tensor. Its tensors fill buckets one after the other; a tensor that does not fit into a
bucket is cut between rows. Every byte of every bucket is written exactly once, which is asserted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from megappo.errors import RunFailed, UserError
from megappo.models.families import rules_in_order
from megappo.models.shape import ModelShape
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.manifest import (
    ALIGNMENT_BYTES,
    Manifest,
    TensorMeta,
    build_manifest,
    dtype_name,
    fingerprint_of,
    item_bytes,
    round_up,
)
from megappo.pp_weights.mapping import Piece, chunk_pieces, expected_hf_tensors
from megappo.pp_weights.update import Table

if TYPE_CHECKING:
    import torch

Gather = Literal["full", "pp"]
Way = Literal["shared_memory", "collective", "cuda_ipc"]
"""How slices come together (`transport.py`)."""


@dataclass(frozen=True)
class Write:
    """One copy that a rank makes, from a parameter of `chunk` to the tensor `piece.hf_name` as it lies in the bucket.

    piece: its HF side counts in what lies in the bucket (for a cut tensor, rows from the first that is there). rows: of the
    local side those that are meant, where the piece is cut along its columns and the tensor between its rows."""

    target: int
    chunk: int
    piece: Piece
    rows: tuple[int, int] | None = None

    def source(self, param: torch.Tensor) -> torch.Tensor:
        """View of the parameter."""
        local = self.piece.local(param)
        return local if self.rows is None else local.narrow(0, self.rows[0], self.rows[1] - self.rows[0])

    @property
    def num_elements(self) -> int:
        return math.prod(self.piece.shape)


@dataclass(frozen=True)
class Target:
    """What one rank receives: the layout of each bucket. shards: HF name -> the piece of the whole tensor that is this target's;
    none with `gather: full`."""

    receiver: int
    buckets: tuple[Manifest, ...]
    shards: Mapping[str, Piece]

    def held(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What this target gets of a complete tensor, as a view."""
        shard = self.shards.get(name)
        return tensor if shard is None else tensor.narrow(shard.dim, shard.start, shard.stop - shard.start)

    @property
    def slot_bytes(self) -> int:
        """Memory that any one of the buckets fits into."""
        return max(bucket.total_bytes for bucket in self.buckets)

    @property
    def room(self) -> Manifest:
        """The layout of that memory before anything lies in it."""
        return Manifest((), self.slot_bytes)


@dataclass(frozen=True)
class TransferPlan:
    """writes[rank][bucket]: the copies of that rank. Replicas (dp, cp) of a stage and tp rank share them, or the first has all.
    tied[rank][bucket]: where the last stage's copy of a tied embedding must equal what was published. table: the whole model."""

    layout: ParallelLayout
    gather: Gather
    table: Table
    targets: tuple[Target, ...]
    writes: tuple[tuple[tuple[Write, ...], ...], ...]
    tied: tuple[tuple[tuple[Write, ...], ...], ...]

    @property
    def num_buckets(self) -> int:
        return len(self.targets[0].buckets)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_of(self.table)

    @cached_property
    def model_bytes(self) -> int:
        """Bytes of the complete model, without alignment. In `gather: pp` replicated tensors count once for each tp rank."""
        return sum(entry.num_bytes for target in self.targets for bucket in target.buckets for entry in bucket.entries)

    @property
    def formula_bytes(self) -> float:
        """Bytes that a rank must receive at least, on average, so that it holds what its target holds: (t p - 1) / (t p) M for
        `full`, (p - 1) / (t p) M for `pp` (arXiv:2409.19256, section 5.3)."""
        t, p = self.layout.tp, self.layout.pp
        return self.model_bytes * ((t * p - 1) if self.gather == "full" else (p - 1)) / (t * p)

    @property
    def largest_tensor_bytes(self) -> int:
        return max((math.prod(shape) * item_bytes(dtype) for dtype, shape in self.table.values()), default=0)

    def target_of(self, rank: int) -> int:
        """Index of the target that the rank contributes to."""
        return self.layout.coordinates(rank).tp if self.gather == "pp" else 0

    def bytes_of(self, write: Write) -> int:
        """Bytes that a write copies."""
        return write.num_elements * item_bytes(self.table[write.piece.hf_name][0])


def build_plan(
    shape: ModelShape,
    layout: ParallelLayout,
    dtypes: Mapping[str, torch.dtype | str],
    *,
    gather: Gather = "full",
    num_writers: int = 1,
    alignment_bytes: int = ALIGNMENT_BYTES,
    bucket_bytes: int | None = None,
) -> TransferPlan:
    """The plan of a model.

    dtypes: HF name -> dtype. num_writers: how many of the dp x cp replicas share the writes. bucket_bytes: size of a bucket;
    None: one bucket that holds everything."""
    if gather == "pp" and shape.num_kv_heads % layout.tp:
        raise UserError(
            f"pp_weights.gather=pp leaves a shard on each of {layout.key}.tp={layout.tp} ranks, which must divide "
            f"num_key_value_heads={shape.num_kv_heads}; use pp_weights.gather=full"
        )
    expected = expected_hf_tensors(shape)
    table = {name: (dtype_name(dtypes[name]), expected[name]) for name in model_order(shape)}
    pieces = {
        (tp, stage): [(chunk, piece) for chunk in range(layout.vpp) for piece in chunk_pieces(shape, layout, tp, stage, chunk)]
        for tp in range(layout.tp)
        for stage in range(layout.pp)
    }
    check_coverage(expected, [piece for held in pieces.values() for _, piece in held if piece.role == "owner"])
    roles = ("owner",) if gather == "full" else ("owner", "replica")
    chosen: dict[tuple[int, int], list[tuple[int, Piece]]] = {}
    shapes: list[dict[str, tuple[int, ...]]] = [{} for _ in range(1 if gather == "full" else layout.tp)]
    shards: list[dict[str, Piece]] = [{} for _ in shapes]
    for place, held in pieces.items():
        kept = [(chunk, piece) for chunk, piece in held if piece.role in (*roles, "tied_copy")]
        chosen[place] = kept if gather == "full" else [(chunk, _shard(piece)) for chunk, piece in kept]
        target = 0 if gather == "full" else place[0]
        shapes[target] |= {piece.hf_name: piece.hf_shape for _, piece in chosen[place]}
        if gather == "pp":
            shards[target] |= {piece.hf_name: piece for _, piece in kept}
    parts = list(_cut_into_buckets(table, shapes, alignment_bytes, bucket_bytes))
    targets = tuple(
        Target(tp, tuple(_bucket_manifest(table, shapes[tp], bucket, alignment_bytes) for bucket in parts), cut)
        for tp, cut in enumerate(shards)  # rank_of(tp=t) is t: a shard's receiver is that tp rank on the first stage
    )
    no_writes: tuple[tuple[Write, ...], ...] = ((),) * len(parts)
    writes, tied = [no_writes] * layout.world_size, [no_writes] * layout.world_size
    for (tp, stage), held in chosen.items():
        target = 0 if gather == "full" else tp
        by_bucket = [list(_writes_of(held, target, bucket)) for bucket in targets[target].buckets]
        copies = [[w for w in found if w.piece.role == "tied_copy"] for found in by_bucket]
        tied[layout.rank_of(tp=tp, pp=stage)] = tuple(map(tuple, copies))
        shares = [_share([w for w in found if w.piece.role != "tied_copy"], table, num_writers) for found in by_bucket]
        for replica in range(num_writers):
            dp, cp = divmod(replica, layout.cp)
            writes[layout.rank_of(tp=tp, cp=cp, dp=dp, pp=stage)] = tuple(tuple(share[replica]) for share in shares)
    plan = TransferPlan(layout, gather, table, targets, tuple(writes), tuple(tied))
    _check_writes(plan)
    return plan


def num_writers(way: Way, layout: ParallelLayout) -> int:
    """How many of the dp x cp replicas write: into shared memory all of them do."""
    return layout.dp * layout.cp if way == "shared_memory" else 1


def num_slots(way: Way, num_buckets: int, alternate: bool) -> int:
    """Buffers of a bucket's size on a receiving rank. In shared memory the next bucket is written while one is read; with
    collectives it is gathered in other room. alternate: versions take turns in two."""
    return 2 if alternate or (way == "shared_memory" and num_buckets > 1) else 1


def check_coverage(expected: Mapping[str, tuple[int, ...]], pieces: Iterable[Piece]) -> None:
    """Raise RunFailed unless `pieces` cover every element of every tensor exactly once, and nothing else."""
    ranges: dict[str, list[Piece]] = {name: [] for name in expected}
    faults = []
    for piece in pieces:
        if piece.hf_name not in expected:
            faults.append(f"{piece.hf_name} is not a tensor of the model")
        elif piece.hf_shape != expected[piece.hf_name]:
            faults.append(f"{piece.hf_name} has shape {expected[piece.hf_name]}, a piece says {piece.hf_shape}")
        elif piece.start < piece.stop:
            ranges[piece.hf_name].append(piece)
    for name, found in ranges.items():
        if len({piece.dim for piece in found}) > 1:
            faults.append(f"{name} is cut along several dimensions")
            continue
        end = 0
        for piece in sorted(found, key=lambda piece: piece.start):
            if piece.start != end:
                fault = "missing" if piece.start > end else "double"
                faults.append(f"{name}: {min(end, piece.start)} to {max(end, piece.start)} is {fault}")
            end = max(end, piece.stop)
        size = expected[name][found[0].dim] if found else math.prod(expected[name])
        if end != size:
            faults.append(f"{name}: {end} to {size} is missing")
    if faults:
        raise RunFailed(
            f"the transfer plan does not cover the model exactly once ({len(faults)} faults): {'; '.join(faults[:5])}"
        )


def model_order(shape: ModelShape) -> list[str]:
    """HF names in the order in which they travel: embedding, layer by layer, the rest.

    The tensors of one Megatron module (q, k and v; gate and up) come side by side, since an engine that fuses them as well can
    use them once it has all of them."""
    modules: dict[tuple[str, int], list[str]] = {}
    for rule, layer in rules_in_order(shape):
        names = modules.setdefault((rule.megatron.rpartition(".")[0], layer), [])
        names += [name.format(layer=layer) for name in rule.hf]
    return [name for names in modules.values() for name in names]


Rows = tuple[int, int] | None
"""(first, end) of a tensor's rows, None for all of it."""


def _cut_into_buckets(
    table: Table, shapes: Sequence[Mapping[str, tuple[int, ...]]], alignment_bytes: int, bucket_bytes: int | None
) -> Iterator[dict[str, Rows]]:
    """{name: rows} of each bucket, in the model's order. Buckets are filled to the last row, so that they are as few as can be.

    A bucket's size counts for the largest of the targets' shards, so that one cut fits all. A row that is larger than a bucket
    makes its bucket larger."""
    if bucket_bytes is None:
        yield dict.fromkeys(table)
        return
    room = bucket_bytes = max(bucket_bytes // alignment_bytes, 1) * alignment_bytes
    bucket: dict[str, Rows] = {}
    for name, (dtype, _) in table.items():
        held = max((shard[name] for shard in shapes), key=math.prod)
        rows, row_bytes = (held[0], math.prod(held[1:]) * item_bytes(dtype)) if held else (1, item_bytes(dtype))
        first = 0
        while True:
            end = min(first + max(room, 0) // max(row_bytes, 1), rows)
            if end == first < rows and not bucket:
                end = first + 1
            if end > first or not rows:
                bucket[name] = None if (first, end) == (0, rows) else (first, end)
                room -= round_up((end - first) * row_bytes, alignment_bytes)
            if end == rows:
                break
            yield bucket
            bucket, room, first = {}, bucket_bytes, end
    if bucket:
        yield bucket


def _bucket_manifest(
    table: Table, shapes: Mapping[str, tuple[int, ...]], bucket: Mapping[str, Rows], alignment_bytes: int
) -> Manifest:
    """The layout of one target's bucket. Of a shard with fewer rows than the largest one some rows may not be there at all."""
    meta, cut = {}, {}
    for name, rows in bucket.items():
        shape = shapes[name]
        if rows is not None and shape[0]:
            rows = (min(rows[0], shape[0]), min(rows[1], shape[0]))
            if rows[0] == rows[1]:
                continue
            cut[name] = rows
        elif rows is not None and rows[0]:
            continue  # a shard of padding alone has come with the first part
        meta[name] = TensorMeta(shape, table[name][0])
    return build_manifest(meta, alignment_bytes, order=meta, rows=cut)


def _writes_of(held: Iterable[tuple[int, Piece]], target: int, bucket: Manifest) -> Iterator[Write]:
    """The pieces, as far as they lie in the bucket."""
    entries = {entry.name: entry for entry in bucket.entries}
    for chunk, piece in held:
        entry = entries.get(piece.hf_name)
        if entry is None:
            continue
        if entry.rows is None:
            yield Write(target, chunk, piece)
        elif piece.dim > 0:
            yield Write(target, chunk, replace(piece, hf_shape=entry.held_shape), entry.rows)
        else:
            for part in _rows_of(piece, *entry.rows):
                inside = replace(
                    part, hf_shape=entry.held_shape, start=part.start - entry.rows[0], stop=part.stop - entry.rows[0]
                )
                yield Write(target, chunk, inside)


def _rows_of(piece: Piece, first: int, end: int) -> Iterator[Piece]:
    """The part of a piece that lies in rows [first, end) of its HF tensor. Of a qkv parameter that is a run in each group."""
    if not piece.split:
        start, stop = max(first, piece.start), min(end, piece.stop)
        if start < stop:
            shift = piece.local_start - piece.start
            yield replace(piece, start=start, stop=stop, local_start=start + shift, local_stop=stop + shift)
        return
    groups, slots, head_rows = piece.split
    run = (piece.local_stop - piece.local_start) * head_rows  # rows of one group
    for group in range(groups):
        begin = piece.start + group * run
        start, stop = max(first, begin), min(end, begin + run)
        if start < stop:
            local = (group * slots + piece.local_start) * head_rows + start - begin
            yield replace(
                piece, start=start, stop=stop, split=(), local_dim=0, local_start=local, local_stop=local + stop - start
            )


def _check_writes(plan: TransferPlan) -> None:
    for index, target in enumerate(plan.targets):
        for number, bucket in enumerate(target.buckets):
            written = [write.piece for of_rank in plan.writes for write in of_rank[number] if write.target == index]
            check_coverage({entry.name: entry.held_shape for entry in bucket.entries}, written)


def _shard(piece: Piece) -> Piece:
    """The piece as a part of this tp rank's shard: a smaller tensor."""
    return replace(piece, hf_shape=piece.shape, start=0, stop=piece.stop - piece.start)


def _share(writes: list[Write], table: Table, num_writers: int) -> list[list[Write]]:
    """Spread writes over the writers, largest first, each to the one with the fewest bytes."""
    shares: list[list[Write]] = [[] for _ in range(num_writers)]
    loads = [0] * num_writers

    def size(write: Write) -> int:
        return write.num_elements * item_bytes(table[write.piece.hf_name][0])

    for write in sorted(writes, key=size, reverse=True):
        writer = loads.index(min(loads))
        shares[writer].append(write)
        loads[writer] += size(write)
    return shares
