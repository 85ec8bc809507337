"""How do vLLM's own senders get the trained weights? `PublishedWeights`: vLLM's `WeightSource` over the weight manager.

With it any of vLLM's trainer-side transfer engines (NCCL, IPC, ...) can feed a vLLM that megappo has not started. Every rank of
the model's layout makes one and iterates it in step with the others, since the ranks bring each tensor together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, layerwise_groups

from megappo.pp_weights.update import Bucket, Table


class Manager(Protocol):
    """What is used of `WeightManager`, with gather: full."""

    @property
    def is_receiver(self) -> bool: ...

    @property
    def table(self) -> Table: ...

    @property
    def buckets(self) -> Sequence[Bucket]: ...

    def iterate(self, version: int) -> Iterator[tuple[str, torch.Tensor | None]]: ...


class PublishedWeights(WeightSource):  # type: ignore[misc]
    """Complete tensors under Hugging Face's names, on the rank that the manager gathers them on; None for each name elsewhere.

    next_version: called at the start of each pass; the version that it brings."""

    def __init__(self, manager: Manager, next_version: Callable[[], int]) -> None:
        self._manager, self._next_version = manager, next_version

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, getattr(torch, dtype), shape) for name, (dtype, shape) in self._manager.table.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        reused = len(self._manager.buckets) > 1  # the next bucket is written over this one, and senders hold several tensors
        for name, tensor in self._manager.iterate(self._next_version()):
            yield name, tensor.clone() if tensor is not None and reused else tensor

    def held_names(self) -> Collection[str] | None:
        return None if self._manager.is_receiver else ()

    def groups(self) -> list[list[str]]:
        """All groups on every rank: one that holds nothing of a group in the end still has a part in bringing it together."""
        groups: list[list[str]] = layerwise_groups(list(self._manager.table))
        return groups
