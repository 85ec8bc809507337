"""How long did a part of a step take? `timed`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed(metrics: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds of the block to `timing_s/{name}`."""
    start = time.perf_counter()
    yield
    key = f"timing_s/{name}"
    metrics[key] = metrics.get(key, 0.0) + time.perf_counter() - start
