"""How do ranks of one host wait for each other in microseconds? `Meeting`: a byte to rank 0 from each, and one back to each."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


class Meeting:
    """Made by all ranks together; gather_objects gives every rank's value to all. Ranks must be able to open each other's /proc.

    A rank that waits is asleep in a read. Where another one dies, the watchdog or the launcher ends it, as in a collective."""

    def __init__(self, rank: int, world_size: int, gather_objects: Callable[[Any], list[Any]]) -> None:
        self._rank, self._world_size = rank, world_size
        self._own, writing = os.pipe()
        doors = gather_objects(f"/proc/{os.getpid()}/fd/{writing}")
        others = range(1, world_size) if rank == 0 else (0,)
        self._doors = [os.open(doors[other], os.O_WRONLY) for other in others]
        self._to_close = [self._own, writing, *self._doors]
        gather_objects(None)  # all doors are open before one may be closed

    def meet(self) -> None:
        """Return once all ranks have called it."""
        if self._rank == 0:
            arrived = 0
            while arrived < self._world_size - 1:
                arrived += len(os.read(self._own, self._world_size))
        for door in self._doors:
            os.write(door, b"x")
        if self._rank != 0:
            os.read(self._own, 1)

    def close(self) -> None:
        """Safe to call twice."""
        for descriptor in self._to_close:
            os.close(descriptor)
        self._to_close = []
