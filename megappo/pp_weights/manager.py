"""How does a version of the weights leave the trainer? `WeightManager.publish`: plan once, copy, exchange, stamp."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from megappo.errors import RunFailed, UserError
from megappo.models.shape import ModelShape
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.buffer import ALIGNMENT_BYTES, TensorMeta, WeightBuffer, weight_buffer_meta
from megappo.pp_weights.mapping import Piece, chunk_pieces
from megappo.pp_weights.naming import complete_name, get_all_params, normalize_pp_vpp_params
from megappo.pp_weights.plan import Gather, TransferPlan, build_plan
from megappo.pp_weights.transport import (
    CollectiveTransport,
    Groups,
    SharedMemoryTransport,
    Transport,
    copy_all,
    gather_objects,
    host_identity,
)
from megappo.pp_weights.verify import checksums, compare_names

logger = logging.getLogger("megappo")

TransportName = Literal["auto", "shared_memory", "collective"]


class ManagerGroups(Groups, Protocol):
    """The model's place: `parallel_state.groups.RoleGroups` serves."""

    @property
    def layout(self) -> ParallelLayout: ...


@dataclass(frozen=True)
class PublishStats:
    """What the last `publish` cost on this rank. received_bytes: counted at the collectives; formula_bytes: the least, on
    average."""

    copy_s: float
    exchange_s: float
    verify_s: float
    copied_bytes: int
    received_bytes: int
    formula_bytes: float


class WeightManager:
    """Hands one model's weights over to generation. Made and used by all ranks of the model's layout together.

    chunks: this rank's model chunks. is_active: whether these chunks hold the weights that are meant to leave (the actor's own,
    in force and on their device); `publish` refuses otherwise. transport "auto": shared memory where all ranks are on one host.
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
        alignment_bytes: int = ALIGNMENT_BYTES,
    ) -> None:
        self._chunks = chunks
        self._layout = layout = groups.layout
        self._rank = groups.rank
        self._is_active = is_active
        world_size = layout.world_size
        meta = [weight_buffer_meta(params) for params in get_all_params(chunks)]
        everyone = gather_objects((host_identity(), meta), world_size)
        hosts = {host for host, _ in everyone}
        if transport == "auto":
            transport = "shared_memory" if len(hosts) == 1 else "collective"
        if transport == "shared_memory" and len(hosts) > 1:
            raise UserError(
                f"pp_weights.transport=shared_memory needs all ranks on one host (and in one container); they are on "
                f"{len(hosts)}: use collective, or auto"
            )
        dtypes = hf_dtypes([chunk_metas for _, chunk_metas in everyone], shape, layout)
        shares = transport == "shared_memory"
        num_writers = layout.dp * layout.cp if shares else 1
        self.plan: TransferPlan = build_plan(
            shape, layout, dtypes, gather=gather, num_writers=num_writers, alignment_bytes=alignment_bytes
        )
        self._transport: Transport = (
            SharedMemoryTransport(self.plan, self._rank, world_size) if shares else CollectiveTransport(self.plan, groups)
        )
        self._writes = self.plan.writes[self._rank]
        self._tied_copy = self._find_tied_copy(shape)
        self._sources: list[torch.Tensor] = []
        self._source_keys: list[tuple[Any, ...]] = []
        self.stats: PublishStats | None = None
        logger.debug("weights: %s, gather %s, %.1f MB", transport, gather, self.plan.model_bytes / 1e6)

    @torch.no_grad()
    def publish(self, version: int, verify: bool = False) -> WeightBuffer | None:
        """Bring the current weights together as `version`; all ranks call it. The buffer on the receiving rank, None elsewhere.

        The engine must have finished reading the version before: this writes into the same memory.
        verify: stamp checksums for the receiver, and check that the copies of tied embeddings are equal."""
        if not self._is_active():
            raise RunFailed("weights are not published: the model that is active in these chunks is not the one to publish")
        start = time.perf_counter()
        self._refresh_sources()
        copy_all(self._transport.destinations, self._sources)
        copied = time.perf_counter()
        self._transport.exchange()
        exchanged = time.perf_counter()
        if verify and self._tied_copy is not None:
            self._check_tied_copy(*self._tied_copy)
        buffer = self._transport.buffer
        if buffer is not None:
            buffer.manifest = buffer.manifest.stamped(version, checksums(buffer.views()) if verify else None)
        self.stats = PublishStats(
            copy_s=copied - start,
            exchange_s=exchanged - copied,
            verify_s=time.perf_counter() - exchanged,
            copied_bytes=sum(source.nbytes for source in self._sources),
            received_bytes=self._transport.received_bytes,
            formula_bytes=self.plan.formula_bytes,
        )
        return buffer

    def close(self) -> None:
        """Let go of the buffers. Safe to call twice."""
        self._sources, self._source_keys = [], []
        self._transport.close()

    def _refresh_sources(self) -> None:
        """Views of the parameters, made anew if a parameter is another object or lies elsewhere than at the last publish."""
        params = get_all_params(self._chunks)
        used = [params[write.chunk][write.piece.param] for write in self._writes]
        keys = [(id(param), param.data_ptr(), param.shape, param.stride()) for param in used]
        if keys == self._source_keys:
            return
        for write, param in zip(self._writes, used, strict=True):
            _check_param(write.piece, param)
        self._sources = [write.piece.local(param) for write, param in zip(self._writes, used, strict=True)]
        self._source_keys = keys

    def _find_tied_copy(self, shape: ModelShape) -> tuple[int, Piece] | None:
        own = self._layout.coordinates(self._rank)
        if own.dp or own.cp:
            return None
        for chunk in range(self._layout.vpp):
            for piece in chunk_pieces(shape, self._layout, own.tp, own.pp, chunk):
                if piece.role == "tied_copy":
                    return chunk, piece
        return None

    def _check_tied_copy(self, chunk: int, piece: Piece) -> None:
        copy = piece.local(get_all_params(self._chunks)[chunk][piece.param])
        published = self._transport.owner_slice(piece)
        if not torch.equal(copy.cpu(), published):
            apart = (copy.cpu().float() - published.float()).abs().max().item()
            raise RunFailed(
                f"tied weights differ: {piece.param} of the last stage and the embedding of the first are {apart:.3g} apart "
                f"(rows {piece.start} to {piece.stop})"
            )


def hf_dtypes(
    metas: Sequence[Sequence[Mapping[str, TensorMeta]]], shape: ModelShape, layout: ParallelLayout
) -> dict[str, torch.dtype]:
    """HF name -> dtype, from every rank's [chunk]{local name: shape, dtype}; checks that the ranks hold exactly the model.

    Raises NamesDiffer or RunFailed: a name that is missing, unexpected, twice there, of another shape, or of several dtypes."""
    dtypes: dict[str, torch.dtype] = {}
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
    if param.numel() and param.data_ptr() == 0:
        raise RunFailed(f"weights are not published: {piece.param} is off-loaded; bring the parameters back first")
