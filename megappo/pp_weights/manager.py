"""How does a version of the weights leave the trainer? `WeightManager.publish`: plan once; then copy, exchange, hand over."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from megappo.errors import RunFailed, UserError
from megappo.models.shape import ModelShape
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.assemble import Assembler
from megappo.pp_weights.buffer import WeightBuffer, available_memory_bytes, views_of, weight_buffer_meta
from megappo.pp_weights.copying import Copies
from megappo.pp_weights.cuda_ipc import DeviceBuffer
from megappo.pp_weights.manifest import ALIGNMENT_BYTES, Manifest, TensorMeta
from megappo.pp_weights.mapping import Piece, chunk_pieces
from megappo.pp_weights.naming import complete_name, get_all_params, normalize_pp_vpp_params
from megappo.pp_weights.plan import Gather, TransferPlan, Way, build_plan, num_slots, num_writers
from megappo.pp_weights.sources import SourceWatch
from megappo.pp_weights.transport import (
    CollectiveTransport,
    Groups,
    SharedMemoryTransport,
    Transport,
    gather_objects,
    host_identity,
    host_slot,
)
from megappo.pp_weights.update import Bucket, Guarded, Receiver, Table, Update
from megappo.pp_weights.verify import checksums, compare_names

logger = logging.getLogger("megappo")

TransportName = Way | Literal["auto"]
Mode = Literal["auto", "full", "bucketed"]
BUCKET_BYTES = 512 << 20
_AUTO_FULL_PART = 4  # mode auto: one buffer for the model where it takes at most a quarter of the memory that is free


class ManagerGroups(Groups, Protocol):
    """The model's place: `parallel_state.groups.RoleGroups` serves."""

    @property
    def layout(self) -> ParallelLayout: ...


@dataclass(frozen=True)
class PublishStats:
    """What the last `publish` cost on this rank, in seconds and bytes. load_s: what the receiver took of this rank's time.
    received_bytes: counted at the collectives; formula_bytes: the least, on average."""

    copy_s: float = 0.0
    exchange_s: float = 0.0
    verify_s: float = 0.0
    load_s: float = 0.0
    copied_bytes: int = 0
    received_bytes: int = 0
    formula_bytes: float = 0.0
    num_buckets: int = 1


class WeightManager:
    """Hands one model's weights over to generation. Made and used by all ranks of the model's layout together.

    chunks: this rank's model chunks. is_active: whether these chunks hold the weights that are meant to leave (the actor's own,
    in force and on their device); `publish` refuses otherwise. transport "auto": shared memory where all ranks are on one host.
    mode "full": the model in one buffer; "bucketed": in buckets of `bucket_bytes`, of which at most two are in memory; "auto":
    bucketed where the whole would take more than a quarter of the free memory. alternate: two buffers take turns from version to
    version (mode full), for an engine that goes on reading the last one.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        shape: ModelShape,
        groups: ManagerGroups,
        *,
        is_active: Callable[[], bool],
        transport: TransportName = "auto",
        gather: Gather = "full",
        mode: Mode = "full",
        bucket_bytes: int = BUCKET_BYTES,
        alignment_bytes: int = ALIGNMENT_BYTES,
        alternate: bool = False,
    ) -> None:
        self._layout = layout = groups.layout
        self._rank = groups.rank
        self._is_active = is_active
        self._world_size = world_size = layout.world_size
        params = get_all_params(chunks)
        devices = {param.device for of_chunk in params for param in of_chunk.values()}
        everyone = gather_objects(
            (host_identity(), [weight_buffer_meta(of_chunk) for of_chunk in params], available_memory_bytes()), world_size
        )
        way = _choose_transport(transport, [host for host, _, _ in everyone], devices)
        dtypes = hf_dtypes([chunk_metas for _, chunk_metas, _ in everyone], shape, layout)

        def plan(bucket_bytes: int | None) -> TransferPlan:
            return build_plan(
                shape,
                layout,
                dtypes,
                gather=gather,
                num_writers=num_writers(way, layout),
                alignment_bytes=alignment_bytes,
                bucket_bytes=bucket_bytes,
            )

        self.plan = plan(bucket_bytes if mode == "bucketed" else None)
        free = min((memory for _, _, memory in everyone if memory is not None), default=None)
        if mode == "auto" and free is not None and self.plan.model_bytes * _AUTO_FULL_PART > free:
            self.plan = plan(bucket_bytes)
        self._alternate = alternate and self.plan.num_buckets == 1
        self._transport = self._connect(way, groups, devices)
        self._num_slots = len(self._transport.slot_paths[0])
        self._tied = self.plan.tied[self._rank]
        self._copies: dict[tuple[int, int], Copies] = {}  # (bucket, slot)
        self._sources = SourceWatch(chunks)
        self._published = 0
        self.stats = PublishStats()
        logger.debug(
            "weights: %s, gather %s, %.1f MB in %d buckets", way, gather, self.plan.model_bytes / 1e6, self.plan.num_buckets
        )

    @property
    def is_receiver(self) -> bool:
        """Whether buckets come together on this rank."""
        return bool(self._transport.slots)

    @property
    def serves_here(self) -> bool:
        """Whether a receiver on this rank is in step with the memory of the buckets. Elsewhere they must be delivered."""
        return self.is_receiver or isinstance(self._transport, SharedMemoryTransport)

    @property
    def table(self) -> Table:
        """HF name -> (dtype, full shape) of all that is published, in the order in which it travels."""
        return self.plan.table

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Where each bucket of the next version will lie, and what will be in it (without checksums), known on every rank."""
        return tuple(
            self._bucket(index, [target.buckets[index] for target in self.plan.targets]) for index in range(self.plan.num_buckets)
        )

    def update(self, version: int, verify: bool = False) -> Update:
        """What a receiver is told first."""
        return Update(
            version, self.plan.table, self.plan.fingerprint, self.plan.num_buckets, shards=len(self.plan.targets), verify=verify
        )

    @torch.no_grad()
    def publish(self, version: int, verify: bool = False, receiver: Receiver | None = None) -> WeightBuffer | None:
        """Bring the current weights together as `version`; all ranks call it. Returns, where the model is in one buffer of this
        host, that buffer on the rank that receives it, and None elsewhere.

        receiver: what takes the version on this rank, if anything (where `serves_here`). Where it raises, this rank still goes
        through the rest with the others, then the error is raised. Without one the reader of the buffer must be done before the
        next version comes.
        verify: stamp checksums for the receivers, and check that the copies of tied embeddings are equal."""
        update = self.update(version, verify)
        guarded = Guarded(receiver)
        guarded.start(update)
        for bucket in self._steps(update, guarded.settle):
            guarded.load(bucket)
        guarded.finish()
        self.stats = replace(self.stats, load_s=guarded.seconds)
        if guarded.error is not None:
            raise guarded.error
        slots = self._transport.slots
        if not slots or self.plan.num_buckets > 1:
            return None
        slot = slots[self._slot(0, self._published - 1)]
        if isinstance(slot, WeightBuffer):
            slot.manifest = bucket.manifests[self.plan.target_of(self._rank)]
            return slot
        return None

    @torch.no_grad()
    def iterate(self, version: int) -> Iterator[tuple[str, torch.Tensor | None]]:
        """(name, complete tensor) one by one, in the order of `table`; None for the tensor on ranks that do not receive.

        All ranks iterate in step. A tensor holds until the next one is asked for. Only where complete tensors are gathered."""
        assert self.plan.gather == "full", "shards are no complete tensors"
        update = self.update(version)
        assembler = Assembler(update, keep=False)
        for bucket in self._steps(update, lambda: None):
            manifest = bucket.manifests[0]
            if self._transport.slots:
                yield from assembler.tensors(manifest, views_of(self._slot_data(bucket.index), manifest))
            else:
                last = [e.name for e in manifest.entries if e.rows is None or e.rows[1] == e.shape[0]]
                yield from ((name, None) for name in last)

    def close(self) -> None:
        """Let go of the buffers. Safe to call twice."""
        self._copies = {}
        self._transport.close()

    def _connect(self, transport: Way, groups: ManagerGroups, devices: set[torch.device]) -> Transport:
        world_size, plan = self._world_size, self.plan
        slots = num_slots(transport, plan.num_buckets, self._alternate)
        if transport == "shared_memory":
            return SharedMemoryTransport(plan, self._rank, world_size, slots)
        device = next(iter(devices))
        make_slot = (lambda target: DeviceBuffer(target.slot_bytes, device)) if transport == "cuda_ipc" else host_slot
        return CollectiveTransport(plan, groups, world_size, slots, device, make_slot)

    def _steps(self, update: Update, settle: Callable[[], None]) -> Iterator[Bucket]:
        """Every bucket, once it lies in the receiver's memory. settle: waits until the buckets before are read."""
        if not self._is_active():
            raise RunFailed("weights are not published: the model that is active in these chunks is not the one to publish")
        self._refresh_params()
        transport = self._transport
        transport.received_bytes = 0
        copy_s = exchange_s = verify_s = 0.0
        copied = 0
        for index in range(self.plan.num_buckets):
            slot = self._slot(index, self._published)
            start = time.perf_counter()
            copies = self._copies_of(index, slot)
            copies.run()
            copied += copies.copied_bytes
            done = time.perf_counter()
            copy_s += done - start
            transport.bring(index)
            exchange_s += time.perf_counter() - done
            settle()
            settled = time.perf_counter()
            transport.complete(index, slot)
            exchanged = time.perf_counter()
            exchange_s += exchanged - settled
            bucket = self._bucket(index, self._stamped(index, slot, update))
            if update.verify:
                self._check_tied(index, slot)
            verify_s += time.perf_counter() - exchanged
            yield bucket
        self._published += 1
        self.stats = PublishStats(
            copy_s=copy_s,
            exchange_s=exchange_s,
            verify_s=verify_s,
            copied_bytes=copied,
            received_bytes=transport.received_bytes,
            formula_bytes=self.plan.formula_bytes,
            num_buckets=self.plan.num_buckets,
        )

    def _slot(self, bucket: int, published: int) -> int:
        return (published if self._alternate else bucket) % self._num_slots

    def _slot_data(self, bucket: int) -> torch.Tensor:
        return self._transport.slots[self._slot(bucket, self._published)].data

    def _bucket(self, index: int, manifests: Sequence[Manifest]) -> Bucket:
        slot = self._slot(index, self._published)
        return Bucket(index, tuple(paths[slot] for paths in self._transport.slot_paths), tuple(manifests))

    def _stamped(self, index: int, slot: int, update: Update) -> list[Manifest]:
        """The bucket's manifests for this version. With `verify` the receivers sum the bytes and all ranks learn the sums."""
        manifests = [target.buckets[index] for target in self.plan.targets]
        if not update.verify:
            return [manifest.stamped(update.version) for manifest in manifests]
        stamped = []
        for target, manifest in zip(self.plan.targets, manifests, strict=True):
            sums = torch.zeros(len(manifest.entries), dtype=torch.uint64)
            if target.receiver == self._rank:
                own = checksums(views_of(self._transport.slots[slot].data, manifest))
                sums = torch.tensor([own[entry.name] for entry in manifest.entries], dtype=torch.uint64)
            if self._world_size > 1:
                dist.broadcast(sums.view(torch.int64), src=target.receiver)
            named = {entry.name: value for entry, value in zip(manifest.entries, sums.tolist(), strict=True)}
            stamped.append(manifest.stamped(update.version, named))
        return stamped

    def _copies_of(self, bucket: int, slot: int) -> Copies:
        """The copies of this rank's writes."""
        key = (bucket, slot)
        if key not in self._copies:
            params = self._sources.params
            writes = self.plan.writes[self._rank][bucket]
            sources = [write.source(params[write.chunk][write.piece.param]) for write in writes]
            destinations = self._transport.destinations(bucket, slot) if writes else []
            self._copies[key] = Copies(zip(destinations, sources, strict=True))
        return self._copies[key]

    def _refresh_params(self) -> None:
        """Forget the views of the parameters if one is another object or lies elsewhere than at the last publish."""
        if not self._sources.have_moved():
            return
        params = self._sources.params
        for of_bucket in self.plan.writes[self._rank]:
            for write in of_bucket:
                _check_param(write.piece, params[write.chunk][write.piece.param])
        self._copies = {}
        self._sources.accept()

    def _check_tied(self, bucket: int, slot: int) -> None:
        """Where this rank holds a copy of the tied embedding: it must be what was published."""
        if not self._tied[bucket]:
            return
        for write in self._tied[bucket]:
            copy = write.source(self._sources.params[write.chunk][write.piece.param]).cpu()
            published = self._transport.published(write, bucket, slot).cpu()
            if not torch.equal(copy, published):
                apart = (copy.float() - published.float()).abs().max().item()
                raise RunFailed(
                    f"tied weights differ: {write.piece.param} of the last stage and the embedding of the first are "
                    f"{apart:.3g} apart"
                )


def _choose_transport(transport: TransportName, hosts: Sequence[str], devices: set[torch.device]) -> Way:
    count = len(set(hosts))
    if transport == "auto":
        return "shared_memory" if count == 1 else "collective"
    if transport in ("shared_memory", "cuda_ipc") and count > 1:
        raise UserError(
            f"pp_weights.transport={transport} needs all ranks on one host (and in one container); they are on "
            f"{count}: use collective, or auto"
        )
    if transport == "cuda_ipc" and {device.type for device in devices} != {"cuda"}:
        raise UserError("pp_weights.transport=cuda_ipc needs a model on GPUs, and it is on a CPU; use shared_memory, or auto")
    return transport


def hf_dtypes(
    metas: Sequence[Sequence[Mapping[str, TensorMeta]]], shape: ModelShape, layout: ParallelLayout
) -> dict[str, torch.dtype | str]:
    """HF name -> dtype, from every rank's [chunk]{local name: shape, dtype}; checks that the ranks hold exactly the model.

    Raises NamesDiffer or RunFailed: a name that is missing, unexpected, twice there, of another shape, or of several dtypes."""
    dtypes: dict[str, torch.dtype | str] = {}
    for tp in range(layout.tp):
        expected: dict[str, tuple[int, ...]] = {}
        feeds: list[tuple[str, str]] = []  # (HF name, Megatron name)
        for stage in range(layout.pp):
            for chunk in range(layout.vpp):
                for piece in chunk_pieces(shape, layout, tp, stage, chunk):
                    name = complete_name(piece.param, layout, stage, chunk)
                    expected[name] = piece.param_shape
                    feeds.append((piece.hf_name, name))
        for replica in range(layout.dp * layout.cp):
            dp, cp = divmod(replica, layout.cp)
            ranks = [layout.rank_of(tp=tp, cp=cp, dp=dp, pp=stage) for stage in range(layout.pp)]
            held = normalize_pp_vpp_params([metas[rank] for rank in ranks], layout)
            compare_names(expected, {name: meta.shape for name, meta in held.items()}, f"parameters of ranks {ranks}")
            for hf_name, name in feeds:
                if dtypes.setdefault(hf_name, held[name].dtype) != held[name].dtype:
                    raise RunFailed(
                        f"{hf_name} is {dtypes[hf_name]} on one rank and {held[name].dtype} on ranks {ranks} ({name})"
                    )
    return dtypes


def _check_param(piece: Piece, param: torch.Tensor) -> None:
    if tuple(param.shape) != piece.param_shape:
        raise RunFailed(f"{piece.param} has shape {tuple(param.shape)} now; it had {piece.param_shape} when the plan was made")
    if param.numel() and not param.untyped_storage().nbytes():  # a view at an offset has an address even so
        raise RunFailed(f"weights are not published: {piece.param} is off-loaded; bring the parameters back first")
