"""What does vLLM's weight-transfer API call? `MemoryTransfer`: a weight-transfer engine of vLLM's that reads memory of this host.

vLLM's own engines rest on NCCL or CUDA. This one is registered as "megappo" in each process that holds a part of the model.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megappo.pp_weights.update import Update, unpack_update
from megappo.rollout.vllm_fill import AliasFiller, Filler, LayerwiseFiller
from megappo.rollout.vllm_intake import Intake

BACKEND = "megappo"


@dataclass
class Announcement(WeightTransferInitInfo):  # type: ignore[misc]
    """What the next update will bring (`Update`, as `pack_update` writes it), and whether its memory is read in place."""

    version: int
    table: dict[str, Any]
    fingerprint: str
    num_buckets: int
    shards: int
    verify: bool
    zero_copy: bool


@dataclass
class BucketInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One filled piece of memory: where it is, and the JSON of its manifest."""

    path: str
    manifest: str


class MemoryTransfer(WeightTransferEngine[Announcement, BucketInfo]):  # type: ignore[misc]
    """init announces the update that follows; start, update (for each bucket) and finish carry it out. `intake` knows how that
    went."""

    init_info_cls = Announcement
    update_info_cls = BucketInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self.intake = Intake(model, self.parallel_config.rank)
        self._layerwise, self._alias = LayerwiseFiller(model, self.model_config), AliasFiller(model)
        self._filler: Filler = self._layerwise
        self._announced: Update | None = None

    def init_transfer_engine(self, init_info: Announcement) -> None:
        fields = asdict(init_info)
        self._filler = self._alias if fields.pop("zero_copy") else self._layerwise
        self._announced = unpack_update(fields)

    def start_weight_update(self) -> None:
        assert self._announced is not None, "init announces each update"
        self.intake.start(self._announced, self._filler)
        self._announced = None

    def receive_weights(self, update_info: BucketInfo) -> None:
        self.intake.take(update_info.path, update_info.manifest)

    def finish_weight_update(self) -> None:
        self.intake.finish()

    def shutdown(self) -> None:
        """Nothing is held between updates."""


def register() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, MemoryTransfer)
