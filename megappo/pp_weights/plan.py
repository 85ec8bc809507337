"""Which rank writes which slice to which byte of which buffer? `TransferPlan`: made once, valid until the layout changes.

A target is one buffer that one rank receives: with `gather: full` a single one with complete tensors, with `gather: pp` one for
each tp rank, with that rank's shard of every tensor. Every byte of every tensor is written exactly once, which is asserted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from megappo.errors import RunFailed
from megappo.models.shape import ModelShape
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.buffer import ALIGNMENT_BYTES, Manifest, TensorMeta, build_manifest
from megappo.pp_weights.mapping import Piece, chunk_pieces, expected_hf_tensors

Gather = Literal["full", "pp"]


@dataclass(frozen=True)
class Write:
    """One copy that a rank makes: `piece.local` of a parameter of `chunk` to `piece.hf` of the target's tensor."""

    target: int
    chunk: int
    piece: Piece


@dataclass(frozen=True)
class Target:
    """One buffer: the rank that receives it, and its layout."""

    receiver: int
    manifest: Manifest


@dataclass(frozen=True)
class TransferPlan:
    """writes[rank]: the copies of that rank. Replicas (dp, cp) of a stage and tp rank share its writes, or the first has all."""

    layout: ParallelLayout
    gather: Gather
    targets: tuple[Target, ...]
    writes: tuple[tuple[Write, ...], ...]

    @property
    def model_bytes(self) -> int:
        """Bytes of the complete model, without alignment. In `gather: pp` replicated tensors count once for each tp rank."""
        return sum(entry.num_bytes for target in self.targets for entry in target.manifest.entries)

    @property
    def formula_bytes(self) -> float:
        """Bytes that a rank must receive at least, on average, so that it holds what its target holds: (t p - 1) / (t p) M for
        `full`, (p - 1) / (t p) M for `pp`."""
        t, p = self.layout.tp, self.layout.pp
        return self.model_bytes * ((t * p - 1) if self.gather == "full" else (p - 1)) / (t * p)

    def target_of(self, rank: int) -> int:
        """Index of the target that the rank contributes to."""
        return self.layout.coordinates(rank).tp if self.gather == "pp" else 0


def build_plan(
    shape: ModelShape,
    layout: ParallelLayout,
    dtypes: Mapping[str, torch.dtype],
    *,
    gather: Gather = "full",
    num_writers: int = 1,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> TransferPlan:
    """The plan of a model. dtypes: HF name -> dtype. num_writers: how many of the dp x cp replicas share the writes."""
    expected = expected_hf_tensors(shape)
    pieces = {
        (tp, stage): [(chunk, piece) for chunk in range(layout.vpp) for piece in chunk_pieces(shape, layout, tp, stage, chunk)]
        for tp in range(layout.tp)
        for stage in range(layout.pp)
    }
    check_coverage(expected, [piece for held in pieces.values() for _, piece in held if piece.role == "owner"])
    roles = ("owner",) if gather == "full" else ("owner", "replica")
    writes: list[tuple[Write, ...]] = [()] * layout.world_size
    metas: list[dict[str, TensorMeta]] = [{} for _ in range(1 if gather == "full" else layout.tp)]
    for (tp, stage), held in pieces.items():
        target = 0 if gather == "full" else tp
        chosen = [
            Write(target, chunk, piece if gather == "full" else _shard(piece)) for chunk, piece in held if piece.role in roles
        ]
        for write in chosen:
            metas[target][write.piece.hf_name] = TensorMeta(write.piece.hf_shape, dtypes[write.piece.hf_name])
        for replica, share in enumerate(_share(chosen, dtypes, num_writers)):
            dp, cp = divmod(replica, layout.cp)
            writes[layout.rank_of(tp=tp, cp=cp, dp=dp, pp=stage)] = tuple(share)
    for target, meta in enumerate(metas):
        written = [write.piece for share in writes for write in share if write.target == target]
        check_coverage({name: size for name, (size, _) in meta.items()}, written)
    # rank_of(tp=t) is t: the receiver of a shard is that tp rank on the first stage
    targets = tuple(Target(tp, build_manifest(meta, alignment_bytes)) for tp, meta in enumerate(metas))
    return TransferPlan(layout, gather, targets, tuple(writes))


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


def _shard(piece: Piece) -> Piece:
    """The piece as the whole of a smaller tensor: this tp rank's shard."""
    return replace(piece, hf_shape=piece.shape, start=0, stop=piece.stop - piece.start)


def _share(writes: list[Write], dtypes: Mapping[str, torch.dtype], num_writers: int) -> list[list[Write]]:
    """Spread writes over the writers, largest first, each to the one with the fewest bytes."""
    shares: list[list[Write]] = [[] for _ in range(num_writers)]
    loads = [0] * num_writers

    def size(write: Write) -> int:
        return math.prod(write.piece.shape) * dtypes[write.piece.hf_name].itemsize

    for write in sorted(writes, key=size, reverse=True):
        writer = loads.index(min(loads))
        shares[writer].append(write)
        loads[writer] += size(write)
    return shares
