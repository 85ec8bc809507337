"""Where does each rank stand, and which layers does it hold? Pure arithmetic, no torch.

`ParallelLayout` is the only owner of the parallel degrees. Ranks are numbered in Megatron's default order
"tp-cp-ep-dp-pp" (megatron/core/parallel_state.py): tp varies fastest, pp slowest.

Words: stage = pipeline rank, chunk = virtual pipeline stage, rank = process.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from megappo.errors import UserError
from megappo.parallel_state.splits import PipelineSplit, layer_counts


@dataclass(frozen=True)
class RankCoordinates:
    """Where one rank stands in the layout."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class ChunkContent:
    """What one chunk of one stage holds: layers by their global numbers, maybe none, and the ends of the model."""

    layers: range
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class ParallelLayout:
    """Parallel degrees of one model, and what follows from them.

    tp, pp, vpp, cp, ep, dp: degrees, all >= 1. vpp is the number of model chunks on each stage.
    num_layers: transformer layers of the model.
    The keys from `layers_per_stage` on say how layers are dealt out to stages and chunks, see `PipelineSplit`; by default evenly.

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
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | None = None
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
        _ = self.table  # refuses what does not fit

    @cached_property
    def table(self) -> tuple[tuple[ChunkContent, ...], ...]:
        """[stage][chunk] -> what it holds. Layers are numbered chunk-major: all stages' chunk 0, then all stages' chunk 1."""
        counts = layer_counts(PipelineSplit(**{f.name: getattr(self, f.name) for f in fields(PipelineSplit)}))
        rows: list[list[ChunkContent]] = [[] for _ in range(self.pp)]
        start = 0
        for chunk in range(self.vpp):
            for stage, row in enumerate(rows):
                layers = range(start, start + counts[stage][chunk])
                is_last = (stage, chunk) == (self.pp - 1, self.vpp - 1)
                row.append(ChunkContent(layers, has_embedding=stage == chunk == 0, has_head=is_last))
                start = layers.stop
        return tuple(map(tuple, rows))

    @cached_property
    def world_size(self) -> int:
        """Number of ranks: tp x cp x dp x pp (expert parallel ranks are a regrouping of dp and cp ranks)."""
        return self.tp * self.cp * self.dp * self.pp

    def layers(self, stage: int, chunk: int = 0) -> range:
        """Global numbers of the layers that (stage, chunk) holds; empty where it holds none."""
        return self.table[stage][chunk].layers

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
        return self.table[stage][chunk].has_embedding

    def holds_head(self, stage: int, chunk: int) -> bool:
        return self.table[stage][chunk].has_head

    @property
    def degrees(self) -> tuple[int, ...]:
        """(tp, pp, vpp, cp, ep, dp, then the layers of each stage's chunks): equal for layouts that can share groups."""
        counts = (len(content.layers) for row in self.table for content in row)
        return (self.tp, self.pp, self.vpp, self.cp, self.ep, self.dp, *counts)

    def __str__(self) -> str:
        parts = [f"{n}{getattr(self, n)}" for n in ("tp", "pp", "vpp", "cp", "ep", "dp") if getattr(self, n) > 1]
        return " x ".join(parts) or "one rank"
