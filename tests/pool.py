"""How do tests run a function on several ranks without paying megatron's import each time? A pool of live, forked workers.

The parent imports torch and megatron once; workers are forked from it and wait. `Pool.run(world, function, *args)` gives ranks
0..world-1 a fresh gloo world, runs the function on each and returns the results by rank.
"""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

JOB_TIMEOUT_S = 240.0


class Pool:
    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        self._jobs = 0

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results by rank. The first failure of any rank is raised as an AssertionError with that rank's traceback."""
        self._grow(world)
        self._jobs += 1
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            for rank in range(world):
                self._workers[rank][1].send((rank, world, store, function, args))
            results: list[Any] = [None] * world
            waiting = set(range(world))
            deadline = time.monotonic() + JOB_TIMEOUT_S
            while waiting:
                for rank in sorted(waiting):
                    process, pipe = self._workers[rank]
                    if pipe.poll(0.002):
                        try:
                            ok, value = pipe.recv()
                        except EOFError:
                            self._fail(f"rank {rank} died (exit code {process.exitcode})")
                        if not ok:
                            self._fail(f"rank {rank} of {world} failed:\n{value}")
                        results[rank] = value
                        waiting.discard(rank)
                if time.monotonic() > deadline:
                    self._fail(f"ranks {sorted(waiting)} of {world} did not finish within {JOB_TIMEOUT_S:.0f} s")
        return results

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        self._workers.clear()

    def _fail(self, message: str) -> None:
        self.close()  # the others may be stuck in a collective: the next test gets new workers
        raise AssertionError(message)

    def _grow(self, world: int) -> None:
        context = mp.get_context("fork")
        while len(self._workers) < world:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, ours), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))


def _serve(pipe: Connection, parents_end: Connection) -> None:
    parents_end.close()
    import torch
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    from megappo.parallel_state.device import prepare_device

    prepare_device()
    while True:
        try:
            rank, world, store_path, function, args = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        try:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
            store = dist.FileStore(store_path, world)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=120))
            result = function(*args)
            dist.barrier()
            pipe.send((True, result))
            del result
            _forget_groups()
            dist.destroy_process_group()
        except BaseException:  # noqa: BLE001 - whatever it was, the parent must hear of it
            with contextlib.suppress(OSError):
                pipe.send((False, traceback.format_exc()))
            os._exit(1)


def _forget_groups() -> None:
    """The next job has a world of its own. Whatever still refers to a group would keep gloo's threads alive, and they spin."""
    import gc

    from megatron.core import parallel_state as mpu

    from megappo.parallel_state.groups import RoleGroups

    if RoleGroups._pristine is not None:
        vars(mpu).update(RoleGroups._pristine)
    mpu._global_process_group_list = None
    RoleGroups._in_force = None
    gc.collect()
