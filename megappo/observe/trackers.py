"""Who else wants the metrics? `Tracker`, metrics.jsonl, and TensorBoard. The one file that knows a tracking library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, SupportsFloat

from megappo.errors import UserError
from megappo.observe.metrics import MetricsWriter


class Tracker(Protocol):
    """Takes the metrics of each step."""

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None: ...

    def close(self) -> None:
        """Write what is still held back. Safe to call twice."""
        ...


class TensorBoardTracker:
    """Scalars as TensorBoard event files (extra `trackers`)."""

    def __init__(self, folder: str | Path) -> None:
        if find_spec("tensorboard") is None:
            raise UserError("run.trackers=[tensorboard] needs tensorboard; install megappo with the extra `trackers`")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        for key, value in metrics.items():
            if math.isfinite(float(value)):
                self._writer.add_scalar(key, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Trackers:
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def open_trackers(run_folder: str | Path, names: Sequence[str] = ()) -> Trackers:
    """metrics.jsonl in the run folder, and the trackers in `names` ("tensorboard": event files in `tensorboard/`)."""
    trackers: list[Tracker] = [MetricsWriter(Path(run_folder) / "metrics.jsonl")]
    if "tensorboard" in names:
        trackers.append(TensorBoardTracker(Path(run_folder) / "tensorboard"))
    return Trackers(trackers)
