"""How do Megatron's ranks write their shards of a model, and read those of another layout? Through dist_checkpointing.

Keys are Megatron's parameter names with global layer numbers, each with its shape in the whole model, so that the content of the
files says nothing of tp, pp, vpp and dp (but for the vocabulary's padding, whose rows nobody reads).
Decision: docs/decisions/013-checkpoint-format.md.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import apply_factories
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _write_item
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megappo.checkpoint.together import cause_of, together
from megappo.errors import RunFailed
from megappo.models.gpt import GPTChunk

Shards = dict[str, Any]
"""Name -> ShardedTensor, or the list of them that a gated layer's matrix is cut into."""

CONTENT = {"non_homogeneous_layers": True}
"""Megatron's word for: each layer has keys of its own, instead of one stacked tensor for all layers."""


def sharded_tensors(chunks: Sequence[GPTChunk], without: Collection[str] = ()) -> Shards:
    """This rank's parameters (no copies) with their places in the whole model. To be called with the model's groups active.

    without: complete names to leave out."""
    shards: Shards = {}
    for number, chunk in enumerate(chunks):
        found = chunk.sharded_state_dict(metadata=dict(CONTENT))
        apply_factories(found)
        for name, shard in found.items():
            # What is not a tensor is Megatron's `_extra_state`, which holds nothing without TransformerEngine.
            if isinstance(shard, ShardedTensor | list) and _first(shard).key not in without:
                shards[f"{number}.{name}"] = shard
    return shards


def write_shards(folder: Path, shards: Shards) -> None:
    """Write all ranks' shards into an empty folder; every rank calls it. A failure of one is raised by all, as RunFailed."""
    what = f"writing {folder}"
    strategy = _SaveInPlace(what)
    failure: Exception | None = None
    try:
        dist_checkpointing.save(
            sharded_state_dict=dict(shards),
            checkpoint_dir=str(folder),
            sharded_strategy=strategy,
            validate_access_integrity=False,  # rank 0 alone would raise; the planner checks the same, and every rank hears of it
            content_metadata=dict(CONTENT),
        )
    except CheckpointException as error:
        raise cause_of(what, error) from error
    except RunFailed:
        raise  # by all ranks, in `strategy.save`
    except Exception as error:  # noqa: BLE001 - every rank raises it below
        # Before and after the shards rank 0 writes a small file while the others go on: they are met where they wait.
        failure = error
        if strategy.is_written:
            dist.barrier()
    together(what, lambda: _raise(failure))


@torch.no_grad()
def read_shards(folder: Path, shards: Shards) -> None:
    """Fill this rank's parameters from a checkpoint of any layout; every rank calls it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # megatron-core 0.16.1 calls torch's older name of `load`
        try:
            dist_checkpointing.load(dict(shards), str(folder), validate_access_integrity=False)
        except CheckpointException as error:
            raise cause_of(f"reading {folder}", error) from error


def _first(shard: Any) -> Any:
    return shard[0] if isinstance(shard, list) else shard


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


class _SaveInPlace(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's format, written by this process. Its own writer starts processes that import all anew and stay."""

    def __init__(self, what: str) -> None:
        super().__init__("torch_dist", 1)
        self.what = what
        self.is_written = False

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        save(
            together(self.what, lambda: mcore_to_pyt_state_dict(by_key, False)),
            storage_writer=_OneByOne(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False, flatten_sharded_tensors=False),
        )
        self.is_written = True


class _OneByOne(FileSystemWriter):
    """One file a rank. torch's own `write_data` keeps the copies of all tensors until the file is complete."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
                for item in plan.items:
                    data: Any = planner.resolve_data(item)
                    if item.type != WriteItemType.BYTE_IO:
                        data = data.detach().cpu()
                        if data.untyped_storage().nbytes() != data.nbytes:
                            data = data.clone()  # a view: torch.save would write all that it is a view of
                    try:
                        results.append(_write_item(self.transforms, stream, data, item, name, self.serialization_format))
                    except RuntimeError as error:
                        # On a full disk torch.save goes on to complain of positions in the file.
                        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
                stream.flush()
                os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done
