"""How do the slices of all ranks come together in the receiver's memory? Through shared memory, or through collectives.

Both are set up once; a steady exchange has neither an object collective nor one for each parameter. Buckets come one after the
other, each in two moves: `bring` may run while the bucket before is still being read, `complete` may not.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megappo.pp_weights.buffer import WeightBuffer, views_of
from megappo.pp_weights.copying import Copies
from megappo.pp_weights.manifest import Manifest, item_bytes, round_up
from megappo.pp_weights.meeting import Meeting
from megappo.pp_weights.plan import Target, TransferPlan, Write


class Groups(Protocol):
    """Where this rank stands: what the hand-over needs of `parallel_state.groups.RoleGroups`. Groups of one rank are not used."""

    @property
    def rank(self) -> int: ...
    @property
    def tp_group(self) -> Any: ...
    @property
    def pp_group(self) -> Any: ...


class Slot(Protocol):
    """Memory for a bucket, which an engine can open: `WeightBuffer`, or `DeviceBuffer` on a GPU."""

    path: str

    @property
    def data(self) -> torch.Tensor: ...

    def close(self) -> None: ...


SlotFactory = Callable[[Target], Slot]


def host_slot(target: Target) -> Slot:
    """Host memory that holds any of the target's buckets."""
    return WeightBuffer.create(target.room)


class Transport(Protocol):
    """One way to bring the slices together."""

    slots: list[Slot]
    """The memory of the receiver; none on other ranks. Buckets take turns in it."""
    slot_paths: list[list[str]]
    """[target][slot] of all targets, on every rank."""
    received_bytes: int
    """Bytes that this rank has taken from other ranks since it was set to 0."""

    def destinations(self, bucket: int, slot: int) -> list[torch.Tensor]:
        """Where each write of this rank goes, in the order of the plan's writes and with the shape of `Write.source`."""
        ...

    def bring(self, bucket: int) -> None:
        """Called by all ranks after they have filled their destinations."""
        ...

    def complete(self, bucket: int, slot: int) -> None:
        """Called by all ranks. When it returns, the receiver's slot holds the bucket."""
        ...

    def published(self, write: Write, bucket: int, slot: int) -> torch.Tensor:
        """What the owner has published of a slice, with the shape of `Write.source` (for the tied copy on the last stage)."""
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

    stage_buffers: one contiguous tensor a rank, this one's own filled, the others room for what comes; sizes may differ. Returns
    handles; with async_op=False they have been waited for."""
    handles = []
    for stage, buffer in enumerate(stage_buffers):
        if buffer.numel() and len(stage_buffers) > 1:
            handles.append(Handle(dist.broadcast(buffer, group=pp_group, group_src=stage, async_op=True), buffer))
    if not async_op:
        for handle in handles:
            handle.wait()
    return handles


class SharedMemoryTransport:
    """All ranks on one host. Each copies its slices to their final place in the receiver's memory; then all meet once."""

    def __init__(self, plan: TransferPlan, rank: int, world_size: int, num_slots: int) -> None:
        own = plan.target_of(rank)
        target = plan.targets[own]
        is_receiver = target.receiver == rank
        self.slots: list[Slot] = [host_slot(target) for _ in range(num_slots)] if is_receiver else []
        paths = gather_objects([slot.path for slot in self.slots], world_size)
        self.slot_paths: list[list[str]] = [paths[target.receiver] for target in plan.targets]
        self._opened: list[Slot] = (
            self.slots if is_receiver else [WeightBuffer.open(path, target.room, writable=True) for path in self.slot_paths[own]]
        )
        self.received_bytes = 0  # the receiver's bytes are written by their owners
        self._target, self._writes = target, plan.writes[rank]
        self._meeting = Meeting(rank, world_size, lambda value: gather_objects(value, world_size))
        self._views: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

    def destinations(self, bucket: int, slot: int) -> list[torch.Tensor]:
        views = self._views_of(bucket, slot)
        return [write.piece.hf(views[write.piece.hf_name]) for write in self._writes[bucket]]

    def bring(self, bucket: int) -> None:
        """The slices lie in place already."""

    def complete(self, bucket: int, slot: int) -> None:
        self._meeting.meet()

    def published(self, write: Write, bucket: int, slot: int) -> torch.Tensor:
        return write.piece.hf(self._views_of(bucket, slot)[write.piece.hf_name])

    def close(self) -> None:
        self._views = {}
        self._meeting.close()
        for slot in self._opened:
            slot.close()

    def _views_of(self, bucket: int, slot: int) -> dict[str, torch.Tensor]:
        key = (bucket, slot)
        if key not in self._views:
            self._views[key] = views_of(self._opened[slot].data, self._target.buckets[bucket])
        return self._views[key]


class CollectiveTransport:
    """Over process groups: the slices of a stage travel in one run of bytes, first over pp, then (`gather: full`) over tp on the
    first stage, where the receiver puts them in place. Beside the receiver's memory each rank has room for one gathered bucket.

    device: where the slices travel, that of the process groups' backend. make_slot: the receiver's memory."""

    def __init__(
        self,
        plan: TransferPlan,
        groups: Groups,
        world_size: int,
        num_slots: int,
        device: torch.device,
        make_slot: SlotFactory = host_slot,
    ) -> None:
        layout, own = plan.layout, plan.layout.coordinates(groups.rank)
        target = plan.targets[plan.target_of(groups.rank)]
        self._groups, self._own, self._target, self._world_size = groups, own, target, world_size
        self._takes_part = own.dp == 0 and own.cp == 0
        self._gathers_tp = plan.gather == "full" and own.pp == 0 and layout.tp > 1
        self.slots: list[Slot] = [make_slot(target) for _ in range(num_slots)] if target.receiver == groups.rank else []
        paths = gather_objects([slot.path for slot in self.slots], world_size)
        self.slot_paths: list[list[str]] = [paths[target.receiver] for target in plan.targets]
        self.received_bytes = 0
        self._gathered: list[_Gathered] = []  # of each bucket
        if self._takes_part:
            tps = range(layout.tp) if self._gathers_tp else (own.tp,)
            ranks = [[layout.rank_of(tp=tp, pp=stage) for stage in range(layout.pp)] for tp in tps]
            runs = [[[plan.writes[rank][bucket] for rank in column] for column in ranks] for bucket in range(plan.num_buckets)]
            room = torch.zeros(max(_room_bytes(plan, run) for run in runs), dtype=torch.uint8, device=device)
            self._gathered = [
                _Gathered(plan, room, list(tps), run, manifest) for run, manifest in zip(runs, target.buckets, strict=True)
            ]
        self._placing: dict[tuple[int, int], Copies] = {}

    def destinations(self, bucket: int, slot: int) -> list[torch.Tensor]:
        if not self._takes_part:
            return []
        stage = self._gathered[bucket].stages[self._own.tp][self._own.pp]
        return [write.piece.as_local(part) for write, part in zip(stage.writes, stage.slices, strict=True)]

    def bring(self, bucket: int) -> None:
        if not self._takes_part:
            return
        gathered = self._gathered[bucket]
        self._gather([stage.data for stage in gathered.stages[self._own.tp]], self._own.pp, self._groups.pp_group)
        if self._gathers_tp:
            self._gather(list(gathered.columns.values()), self._own.tp, self._groups.tp_group)

    def complete(self, bucket: int, slot: int) -> None:
        several = len(self.slot_paths) > 1  # the engine reads the memory of several ranks: none may be early or late
        if several:
            meet(self._world_size)
        if self.slots:
            self._placing_of(bucket, slot).run()
            if self.slots[slot].data.is_cuda:  # another process reads next, on a stream of its own
                torch.cuda.current_stream().synchronize()
        if several:
            meet(self._world_size)

    def published(self, write: Write, bucket: int, slot: int) -> torch.Tensor:
        first_stage = self._gathered[bucket].stages[self._own.tp][0]  # the same tp rank holds the same rows there
        sent = zip(first_stage.writes, first_stage.slices, strict=True)
        wanted = (write.piece.hf_name, write.piece.start)
        return next(part for other, part in sent if (other.piece.hf_name, other.piece.start) == wanted)

    def close(self) -> None:
        self._gathered, self._placing = [], {}
        for slot in self.slots:
            slot.close()

    def _gather(self, buffers: list[torch.Tensor], own: int, group: Any) -> None:
        for handle in all_gather_pp_params(buffers, group):
            handle.wait()
        self.received_bytes += sum(buffer.numel() for index, buffer in enumerate(buffers) if index != own)

    def _placing_of(self, bucket: int, slot: int) -> Copies:
        """How the receiver puts the gathered slices in place."""
        key = (bucket, slot)
        if key not in self._placing:
            gathered = self._gathered[bucket]
            views = views_of(self.slots[slot].data, self._target.buckets[bucket])
            pieces = [write.piece for write in gathered.writes]
            places = [views[p.hf_name].narrow(p.dim, p.start, p.stop - p.start) for p in pieces]
            self._placing[key] = Copies(zip(places, gathered.slices, strict=True))
        return self._placing[key]


@dataclass
class _Stage:
    """What one stage and tp rank sends: the slices of its writes in one run of bytes."""

    data: torch.Tensor
    writes: Sequence[Write]
    slices: list[torch.Tensor]


class _Gathered:
    """One bucket on its way: for each tp rank the slices of all its stages side by side, so that they can travel together or each
    stage alone. The room is shared with the buckets before and after."""

    def __init__(
        self,
        plan: TransferPlan,
        room: torch.Tensor,
        tps: list[int],
        runs: Sequence[Sequence[Sequence[Write]]],
        manifest: Manifest,
    ) -> None:
        self.columns: dict[int, torch.Tensor] = {}
        self.stages: dict[int, list[_Stage]] = {}
        begin = 0
        for tp, column in zip(tps, runs, strict=True):
            start = begin
            self.stages[tp] = []
            for writes in column:
                offsets, end = _offsets(plan, writes, begin, manifest.alignment_bytes)
                slices = [_slice(plan, room, write, offset) for write, offset in zip(writes, offsets, strict=True)]
                self.stages[tp].append(_Stage(room[begin:end], writes, slices))
                begin = end
            self.columns[tp] = room[start:begin]

    @cached_property
    def writes(self) -> list[Write]:
        return [write for stages in self.stages.values() for stage in stages for write in stage.writes]

    @cached_property
    def slices(self) -> list[torch.Tensor]:
        return [part for stages in self.stages.values() for stage in stages for part in stage.slices]


def _room_bytes(plan: TransferPlan, runs: Sequence[Sequence[Sequence[Write]]]) -> int:
    """Bytes of the room that the slices of a bucket take."""
    end = 0
    for column in runs:
        for writes in column:
            _, end = _offsets(plan, writes, end, plan.targets[0].buckets[0].alignment_bytes)
    return end


def _offsets(plan: TransferPlan, writes: Sequence[Write], begin: int, alignment_bytes: int) -> tuple[list[int], int]:
    offsets = []
    for write in writes:
        offsets.append(begin)
        begin += round_up(plan.bytes_of(write), alignment_bytes)
    return offsets, begin


def _slice(plan: TransferPlan, room: torch.Tensor, write: Write, offset: int) -> torch.Tensor:
    dtype = plan.table[write.piece.hf_name][0]
    return room[offset : offset + write.num_elements * item_bytes(dtype)].view(getattr(torch, dtype)).view(write.piece.shape)


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
