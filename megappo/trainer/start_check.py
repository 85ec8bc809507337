"""Did the weights arrive as they are in the folder? `StartCheck` reads the very memory that the engine gets."""

from __future__ import annotations

import torch

from megappo.checkpoint.source import hf_tensors
from megappo.errors import RunFailed
from megappo.pp_weights.assemble import Assembler
from megappo.pp_weights.cuda_ipc import memory_of
from megappo.pp_weights.plan import TransferPlan
from megappo.pp_weights.update import Bucket, Update
from megappo.pp_weights.verify import checksum


class StartCheck:
    """A receiver for the first version: what is published must be the tensors of `model_path`, name by name. Their checksums are
    compared, so that neither side is in memory as a whole.

    `finish` raises RunFailed with the names that differ: the way from the folder to the chunks and back is then wrong."""

    def __init__(self, plan: TransferPlan, model_path: str) -> None:
        self._plan, self._model_path = plan, model_path
        self._assemblers: list[Assembler] = []
        self._sums: list[dict[str, int]] = []

    def start(self, update: Update) -> None:
        self._assemblers = [Assembler(update, keep=False) for _ in range(update.shards)]
        self._sums = [{} for _ in range(update.shards)]

    def settle(self) -> None:
        """`load` has read all of it."""

    def load(self, bucket: Bucket) -> None:
        parts = zip(self._assemblers, self._sums, bucket.paths, bucket.manifests, strict=True)
        for assembler, sums, path, manifest in parts:
            with memory_of(path, manifest) as views:
                for name, tensor in assembler.tensors(manifest, views):
                    sums[name] = checksum(tensor)

    def finish(self) -> None:
        wrong = []
        left = [dict(sums) for sums in self._sums]
        for name, tensor in hf_tensors(self._model_path):
            dtype = self._plan.table[name][0] if name in self._plan.table else None
            for target, sums in zip(self._plan.targets, left, strict=True):
                found = sums.pop(name, None)
                if dtype is None or found != checksum(target.held(name, tensor).to(getattr(torch, dtype))):
                    wrong.append(name)
        wrong += [name for sums in left for name in sums]
        if wrong:
            raise RunFailed(
                f"the weights that were published at the start are not those of {self._model_path}: {len(wrong)} tensors differ, "
                f"first {', '.join(wrong[:3])}"
            )
