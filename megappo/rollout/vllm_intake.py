"""What does a vLLM worker do with updates? `Intake`: opens each bucket, checks it, and lets a filler take its tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megappo.errors import RunFailed
from megappo.pp_weights.assemble import Assembler
from megappo.pp_weights.cuda_ipc import memory_of
from megappo.pp_weights.manifest import Manifest
from megappo.pp_weights.update import Update
from megappo.pp_weights.verify import NamesDiffer
from megappo.rollout.vllm_fill import Filler
from megappo.rollout.vllm_layers import shard_shapes

logger = logging.getLogger("megappo")


class Intake:
    """The updates of one worker, one after the other. What goes wrong is kept in `failure`, and nothing of that update follows.

    Nothing raises: where one of several workers raises, vLLM leaves the replies of the others lying, and takes them for those of
    the next call.

    worker: rank of the worker. Where all workers read the same bytes, the first compares the checksums."""

    def __init__(self, model: torch.nn.Module, worker: int) -> None:
        self._model, self._worker = model, worker
        self._filler: Filler | None = None  # of the update under way
        self.failure: str | None = None
        self.cloned_bytes = 0

    def start(self, update: Update, filler: Filler) -> None:
        if update.shards == 1 and self._worker > 0:
            update = replace(update, verify=False)
        self._assembler = Assembler(update)
        self._shard_shapes = shard_shapes(self._model) if update.shards > 1 else None
        self._filler, self.failure, self.cloned_bytes = filler, None, 0
        self._run(lambda filler: filler.begin(update))

    def take(self, path: str, manifest_json: str) -> None:
        """Load one bucket. Its memory may be written again when this returns (but see `AliasFiller`)."""

        def load(filler: Filler) -> None:
            manifest = Manifest.from_json(manifest_json)
            self._check_shards(manifest)
            with memory_of(path, manifest) as views:
                self.cloned_bytes += filler.put(self._assembler.tensors(manifest, views), views)

        self._run(load)

    def finish(self) -> None:
        """Fails where an announced tensor did not come."""

        def close(filler: Filler) -> None:
            self._assembler.finish()
            filler.end()
            self._filler = None

        self._run(close)

    def abandon(self) -> None:
        """End the update that is under way, if there is one, and put the layers back together."""
        if self._filler is not None:
            filler, self._filler = self._filler, None
            filler.abandon()

    def _run(self, step: Callable[[Filler], None]) -> None:
        if self._filler is None:
            return  # it has failed, and its update with it
        try:
            step(self._filler)
        except Exception as error:
            logger.exception("an update of the weights fails")
            self.failure = str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"
            self.abandon()

    def _check_shards(self, manifest: Manifest) -> None:
        """vLLM's loaders would take the first rows of a shard that is too large, and say nothing."""
        expected: dict[str, Any] | None = self._shard_shapes
        if expected is None:
            return
        wrong = [
            f"{entry.name} {entry.shape}, this worker's shard is {expected[entry.name]}"
            for entry in manifest.entries
            if entry.name in expected and entry.shape != expected[entry.name]
        ]
        if wrong:
            raise NamesDiffer(f"weights version {manifest.weight_version}", [], [], wrong)
