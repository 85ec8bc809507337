"""Where does each rank stand, and which layers does it hold? Pure arithmetic, no torch.

`ParallelLayout` is the only owner of the parallel degrees. Ranks are numbered in Megatron's default order
"tp-cp-ep-dp-pp" (megatron/core/parallel_state.py): tp varies fastest, pp slowest.

Words: stage = pipeline rank, chunk = virtual pipeline stage, rank = process.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from megappo.errors import UserError


@dataclass(frozen=True)
class RankCoordinates:
    """Where one rank stands in the layout."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel degrees of one model, and what follows from them.

    tp, pp, vpp, cp, ep, dp: degrees, all >= 1. vpp is the number of model chunks on each stage.
    num_layers: transformer layers of the model.
    layers_per_stage: layers of each of the pp stages, or None for an even split.

    Raises UserError where something does not divide, naming the values that would.
    """

    num_layers: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    key: str = "actor.parallel"  # the config section that error messages name

    def __post_init__(self) -> None:
        for name in ("num_layers", "tp", "pp", "vpp", "cp", "ep", "dp"):
            value = getattr(self, name)
            if value < 1:
                raise UserError(f"{self.key}.{name}={value} must be at least 1")
        if self.vpp > 1 and self.pp == 1:
            raise UserError(
                f"{self.key}.vpp={self.vpp} needs pipeline stages: with {self.key}.pp=1 set vpp to 1, or raise pp to 2 or more"
            )
        if self.layers_per_stage is None:
            self._check_even_split()
        else:
            self._check_given_split(self.layers_per_stage)

    def _check_even_split(self) -> None:
        pieces = self.pp * self.vpp
        if self.num_layers % pieces == 0:
            return
        if self.num_layers % self.pp:
            fits = [p for p in range(1, self.num_layers + 1) if self.num_layers % p == 0]
            raise UserError(
                f"{self.key}.pp={self.pp} does not divide num_layers={self.num_layers}; use {_one_of(fits)}, or give "
                f"{self.key}.layers_per_stage"
            )
        per_stage = self.num_layers // self.pp
        fits = [v for v in range(1, per_stage + 1) if per_stage % v == 0]
        raise UserError(
            f"{self.key}.vpp={self.vpp} does not divide the {per_stage} layers of each stage "
            f"(num_layers={self.num_layers}, pp={self.pp}); use {_one_of(fits)}"
        )

    def _check_given_split(self, split: tuple[int, ...]) -> None:
        if len(split) != self.pp:
            raise UserError(
                f"{self.key}.layers_per_stage={list(split)} has {len(split)} entries; {self.key}.pp={self.pp} needs {self.pp}"
            )
        if sum(split) != self.num_layers or min(split) < 1:
            raise UserError(
                f"{self.key}.layers_per_stage={list(split)} must hold positive counts that sum to num_layers={self.num_layers} "
                f"(they sum to {sum(split)})"
            )
        for stage, count in enumerate(split):
            if count % self.vpp:
                raise UserError(
                    f"{self.key}.layers_per_stage[{stage}]={count} is not a multiple of {self.key}.vpp={self.vpp}; "
                    f"use {count // self.vpp * self.vpp or self.vpp} or {(count // self.vpp + 1) * self.vpp}"
                )

    @cached_property
    def world_size(self) -> int:
        """Number of ranks: tp x cp x dp x pp (expert parallel ranks are a regrouping of dp and cp ranks)."""
        return self.tp * self.cp * self.dp * self.pp

    @cached_property
    def stage_layer_counts(self) -> tuple[int, ...]:
        """Layers of each stage, all its chunks together."""
        return self.layers_per_stage or (self.num_layers // self.pp,) * self.pp

    def layers(self, stage: int, chunk: int = 0) -> range:
        """Global numbers of the layers that (stage, chunk) holds. Chunk-major: all stages' chunk 0, then all stages' chunk 1."""
        per_chunk = [count // self.vpp for count in self.stage_layer_counts]
        first = chunk * sum(per_chunk) + sum(per_chunk[:stage])
        return range(first, first + per_chunk[stage])

    def coordinates(self, rank: int) -> RankCoordinates:
        """Coordinates of a rank in Megatron's order."""
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return RankCoordinates(tp=tp, cp=cp, dp=dp, pp=pp)

    def rank_of(self, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Inverse of `coordinates`."""
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def group_of(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from `rank` only along `axes` ("tp", "cp", "dp", "pp"), ascending."""
        own = self.coordinates(rank)
        fixed = [a for a in ("tp", "cp", "dp", "pp") if a not in axes]
        return [
            other
            for other in range(self.world_size)
            if all(getattr(self.coordinates(other), a) == getattr(own, a) for a in fixed)
        ]

    def holds_embedding(self, stage: int, chunk: int) -> bool:
        return stage == 0 and chunk == 0

    def holds_head(self, stage: int, chunk: int) -> bool:
        return stage == self.pp - 1 and chunk == self.vpp - 1

    @property
    def degrees(self) -> tuple[int, ...]:
        """(tp, pp, vpp, cp, ep, dp, then the layers of each stage): equal for layouts that can share groups."""
        return (self.tp, self.pp, self.vpp, self.cp, self.ep, self.dp, *self.stage_layer_counts)

    def __str__(self) -> str:
        parts = [f"{n}{getattr(self, n)}" for n in ("tp", "pp", "vpp", "cp", "ep", "dp") if getattr(self, n) > 1]
        return " x ".join(parts) or "one rank"


def _one_of(values: list[int]) -> str:
    if len(values) > 8:
        values = values[:7] + values[-1:]
    return ", ".join(map(str, values[:-1])) + (" or " if len(values) > 1 else "") + str(values[-1])
