"""How do the slices of all ranks come together in the receiver's buffer? Through shared memory, or through collectives.

Both are set up once; a steady exchange has neither an object collective nor one for each parameter.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megappo.pp_weights.buffer import Manifest, MemoryBuffer, TensorMeta, WeightBuffer, build_manifest, build_memory_reference
from megappo.pp_weights.mapping import Piece
from megappo.pp_weights.plan import TransferPlan, Write


class Groups(Protocol):
    """Where this rank stands: what the hand-over needs of `parallel_state.groups.RoleGroups`. Groups of one rank are not used."""

    @property
    def rank(self) -> int: ...
    @property
    def tp_group(self) -> Any: ...
    @property
    def pp_group(self) -> Any: ...


class Transport(Protocol):
    """One way to bring the slices together."""

    destinations: list[torch.Tensor]
    """Where each write of this rank goes, in the order of the plan's writes and with the shape of `Piece.local`."""
    buffer: WeightBuffer | None
    """The complete buffer; None on ranks that do not receive one."""
    received_bytes: int
    """Bytes that this rank took from other ranks in the last exchange."""

    def exchange(self) -> None:
        """Called by all ranks after they have filled their destinations. When it returns, the receiver's buffer is complete."""
        ...

    def owner_slice(self, piece: Piece) -> torch.Tensor:
        """A slice as its owner has published it (for the check of the tied copy on the last stage)."""
        ...

    def close(self) -> None: ...


@dataclass
class Handle:
    """A collective under way. It keeps its buffer alive until `wait` has returned."""

    work: Any
    tensor: torch.Tensor | None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
        self.work = self.tensor = None


def all_gather_pp_params(stage_buffers: Sequence[torch.Tensor], pp_group: Any, async_op: bool = True) -> list[Handle]:
    """Give every rank of the group the buffers of all: one collective for each, on whole buffers. All ranks of the group call it.

    stage_buffers: one contiguous tensor a rank, this one's own filled, the others room for what comes; sizes may differ."""
    handles = []
    for stage, buffer in enumerate(stage_buffers):
        if buffer.numel() and len(stage_buffers) > 1:
            handles.append(Handle(dist.broadcast(buffer, group=pp_group, group_src=stage, async_op=True), buffer))
    if not async_op:
        for handle in handles:
            handle.wait()
    return handles


class SharedMemoryTransport:
    """All ranks on one host: each copies its slices to their final place in the receiver's buffer; then they meet once."""

    def __init__(self, plan: TransferPlan, rank: int, world_size: int) -> None:
        mine = [index for index, target in enumerate(plan.targets) if target.receiver == rank]
        self.buffer = WeightBuffer.create(plan.targets[mine[0]].manifest) if mine else None
        paths = gather_objects(self.buffer.path if self.buffer else None, world_size)
        index = plan.target_of(rank)
        target = plan.targets[index]
        self._shared = self.buffer or WeightBuffer.open(paths[target.receiver], target.manifest, writable=True)
        self._world_size = world_size
        self._views = self._shared.views()
        self.destinations = [write.piece.hf(self._views[write.piece.hf_name]) for write in plan.writes[rank]]
        self.received_bytes = 0

    def exchange(self) -> None:
        meet(self._world_size)

    def owner_slice(self, piece: Piece) -> torch.Tensor:
        tensor = self._views[piece.hf_name]
        return tensor if tuple(tensor.shape) == piece.shape else tensor.narrow(piece.dim, piece.start, piece.stop - piece.start)

    def close(self) -> None:
        self.destinations, self._views = [], {}
        self._shared.close()


class CollectiveTransport:
    """Over process groups: the slices of a stage travel in one buffer, first over pp, then (`gather: full`) over tp on the first
    stage, where the receiver puts them in place. Beside the receiver's buffer each rank keeps one of what it gathers."""

    def __init__(self, plan: TransferPlan, groups: Groups) -> None:
        layout, own = plan.layout, plan.layout.coordinates(groups.rank)
        target = plan.targets[plan.target_of(groups.rank)]
        self._groups, self._own = groups, own
        self._takes_part = own.dp == 0 and own.cp == 0
        self._gathers_tp = plan.gather == "full" and own.pp == 0 and layout.tp > 1
        self.buffer = WeightBuffer.create(target.manifest) if target.receiver == groups.rank else None
        self.destinations, self.received_bytes = [], 0
        self._stages: dict[int, list[_Stage]] = {}  # tp rank -> its stages
        self._shards: dict[int, torch.Tensor] = {}  # tp rank -> the bytes of all its stages
        if self._takes_part:
            for tp in range(layout.tp) if self._gathers_tp else (own.tp,):
                writes = [plan.writes[layout.rank_of(tp=tp, pp=stage)] for stage in range(layout.pp)]
                self._shards[tp], self._stages[tp] = _pack(writes, target.manifest)
            mine = self._stages[own.tp][own.pp]
            self.destinations = [write.piece.as_local(mine.slices[write.piece.hf_name]) for write in mine.writes]
        self._places, self._slices = self._placement(self.buffer) if self.buffer else ([], [])

    def exchange(self) -> None:
        self.received_bytes = 0
        if not self._takes_part:
            return
        self._gather([stage.data for stage in self._stages[self._own.tp]], self._own.pp, self._groups.pp_group)
        if self._gathers_tp:
            self._gather(list(self._shards.values()), self._own.tp, self._groups.tp_group)
        if self.buffer is not None:
            copy_all(self._places, self._slices)

    def owner_slice(self, piece: Piece) -> torch.Tensor:
        return self._stages[self._own.tp][0].slices[piece.hf_name]  # the same tp rank on the first stage holds the same rows

    def close(self) -> None:
        self.destinations, self._places, self._slices = [], [], []
        self._stages, self._shards = {}, {}
        if self.buffer is not None:
            self.buffer.close()

    def _gather(self, buffers: list[torch.Tensor], own: int, group: Any) -> None:
        for handle in all_gather_pp_params(buffers, group):
            handle.wait()
        self.received_bytes += sum(buffer.numel() for index, buffer in enumerate(buffers) if index != own)

    def _placement(self, buffer: WeightBuffer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where the receiver puts each gathered slice, and the slice."""
        views = buffer.views()
        gathered = [(stage.slices, write.piece) for stages in self._stages.values() for stage in stages for write in stage.writes]
        places = [views[piece.hf_name].narrow(piece.dim, piece.start, piece.stop - piece.start) for _, piece in gathered]
        return places, [slices[piece.hf_name] for slices, piece in gathered]


@dataclass
class _Stage:
    """What one stage and tp rank sends: the slices of its writes under their HF names, in one run of bytes."""

    data: torch.Tensor
    writes: Sequence[Write]
    slices: dict[str, torch.Tensor]


def _pack(stage_writes: Sequence[Sequence[Write]], manifest: Manifest) -> tuple[torch.Tensor, list[_Stage]]:
    """Room for the slices of one tp rank, all stages side by side, so that they can travel together or each alone."""
    dtypes = {entry.name: entry.torch_dtype for entry in manifest.entries}
    metas = [{w.piece.hf_name: TensorMeta(w.piece.shape, dtypes[w.piece.hf_name]) for w in writes} for writes in stage_writes]
    layouts = [build_manifest(meta, manifest.alignment_bytes) for meta in metas]
    whole = torch.zeros(sum(layout.total_bytes for layout in layouts), dtype=torch.uint8)
    parts = torch.split(whole, [layout.total_bytes for layout in layouts])
    stages = [
        _Stage(part, writes, build_memory_reference(meta, MemoryBuffer(layout, part)))
        for part, writes, meta, layout in zip(parts, stage_writes, metas, layouts, strict=True)
    ]
    return whole, stages


def copy_all(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source to its destination in one call; with no tensors, nothing."""
    if destinations:
        torch._foreach_copy_(destinations, sources)


def meet(world_size: int) -> None:
    """All ranks wait for each other. On a host tensor, so that it works beside NCCL too."""
    if world_size > 1:
        dist.all_reduce(torch.zeros(1))


def gather_objects(value: Any, world_size: int) -> list[Any]:
    """Every rank's value, in the order of the ranks. For the set-up only."""
    if world_size == 1:
        return [value]
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def host_identity() -> str:
    """Equal for processes that can open each other's memory through /proc: same machine, same boot, same process namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    boot_id = boot.read_text(encoding="ascii").strip() if boot.exists() else ""
    return f"{socket.gethostname()} {boot_id} {os.stat('/proc/self/ns/pid').st_ino}"
