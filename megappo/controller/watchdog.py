"""How does a rank notice that another one is gone, when it is stuck in a collective itself? A watchdog beside the main thread.

Each rank beats on the rendezvous store: rank r is in phase p since t. A watchdog ends its process where
- another rank has recorded a failure (on the store or in the run folder),
- the process of another rank on this host ended without saying goodbye,
- a rank's beat is missing for `watchdog_s`, or the store does not answer for as long,
- something that this rank needs is gone, such as its engine's process (`watch`).
It records the first cause, gives the main thread `grace_s` to end by itself (Python cannot unwind a thread that waits inside gloo
or NCCL), and then calls os._exit(1).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import psutil
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from megappo.controller.failure import (
    Failure,
    RankFailed,
    discard_failure,
    failure_of,
    is_consequence,
    log_path,
    read_failure,
    write_failure,
)

logger = logging.getLogger("megappo")

STORE_PREFIX = "megappo/watchdog"
CAUSE_WAIT_S = 1.0  # how long a consequence waits for its cause to be recorded
TICK_S = 0.2
LOOK_EVERY_S = 1.0


class Watchdog:
    """This rank's place in the world (rank, world_size, store) and the threads that watch over it.

        with Watchdog(store, rank, world_size, run_dir, watchdog_s) as watchdog:
            with watchdog.phase("build"): ...

    Leaving the block with an exception records it as this rank's failure.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, run_dir: Path | None, watchdog_s: float = 60.0, grace_s: float = 5.0
    ) -> None:
        self.store, self.rank, self.world_size, self.run_dir = store, rank, world_size, run_dir
        self.watchdog_s, self.grace_s = watchdog_s, grace_s
        self.failure: Failure | None = None
        # A client of its own: the main thread may block in a `get` or `wait` and would hold a shared one.
        self._beats: Store = PrefixStore(STORE_PREFIX, store.clone())  # type: ignore[attr-defined]
        self._phase, self._phase_since = "start", time.monotonic()
        self._is_ending = False
        self._closed = threading.Event()
        self._last_answer = time.monotonic()
        self._exit_at: float | None = None
        self._peers: dict[int, tuple[str, int]] = {}  # rank -> (host, pid)
        self._process_handles: dict[int, int] = {}  # pidfd -> rank, of the other ranks on this host
        self._seen: dict[int, tuple[str, float]] = {}  # rank -> (last beat, when it changed)
        self._faults: list[Callable[[], str | None]] = []
        if run_dir is not None and rank == 0:
            discard_failure(run_dir, older_than=psutil.Process().create_time())
        self._beats.set(f"peer/{rank}", json.dumps([socket.gethostname(), os.getpid(), _host_key()]))
        self._threads = [threading.Thread(target=f, daemon=True, name=f.__name__) for f in (self._watch, self._guard)]
        for thread in self._threads:
            thread.start()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say what this rank is doing; failure messages name it. An exception leaves the phase standing until it is recorded."""
        before = self._phase, self._phase_since
        self._phase, self._phase_since = name, time.monotonic()
        yield
        self._phase, self._phase_since = before

    def fail(self, error: BaseException) -> Failure:
        """Record an exception of this rank. Returns the run's first cause, which may be another rank's."""
        if is_consequence(error):
            cause = self._wait_for_cause()
            if cause is not None:
                return cause
        own = failure_of(error, self.rank, self._phase, self.run_dir)
        if is_consequence(error):
            own = _with_phases(own, self._phases())
        return self._record(own)

    def check(self) -> None:
        """Raise the run's failure, if there is one. For whoever waits for another rank."""
        if self.failure is not None:
            raise RankFailed(self.failure)

    def watch(self, fault: Callable[[], str | None]) -> None:
        """Ask `fault` from now on what is wrong with something that this rank needs, e.g. a child process; None: nothing is."""
        self._faults.append(fault)

    def expect_end(self) -> None:
        """From here on the end of other ranks is no failure: the driver has said that the run is over."""
        self._is_ending = True

    def close(self) -> None:
        """This rank ends in order: it says goodbye and its watchdog stops."""
        self._is_ending = True
        if self.failure is None:
            try:
                self._beats.set(f"done/{self.rank}", "1")
            except RuntimeError as error:  # the host of the store has ended before us
                logger.debug("rank %d could not say goodbye: %s", self.rank, error)
        self._stop()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        if isinstance(error, Exception):
            self.fail(error)
        self._stop()

    def _stop(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(timeout=2 * TICK_S + 1)
        for handle in self._process_handles:
            os.close(handle)
        self._process_handles.clear()

    # -- the thread that talks to the store ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        interval = max(min(self.watchdog_s / 10, 10.0), 0.05)
        tick = min(TICK_S, interval)
        next_beat, next_look, beat_number, last_phase = 0.0, 0.0, 0, ""
        try:
            while not self._closed.is_set():
                now = time.monotonic()
                if now >= next_beat or self._phase != last_phase:
                    beat_number, next_beat, last_phase = beat_number + 1, now + interval, self._phase
                    beat = {"n": beat_number, "phase": self._phase, "for_s": round(now - self._phase_since, 1)}
                    self._beats.set(f"beat/{self.rank}", json.dumps(beat))
                if now >= next_look:
                    next_look = now + min(interval, LOOK_EVERY_S)
                    self._look_for_failure()
                    self._find_peers()
                    self._check_beats()
                    self._check_parts()
                self._last_answer = time.monotonic()
                self._check_processes(tick)
        except RuntimeError as error:  # DistNetworkError: the process that hosts the store is gone
            if not self._is_ending and not self._closed.is_set():
                self._lost_store(error)

    def _look_for_failure(self) -> None:
        failure = self._recorded()
        if failure is not None:
            self._notice(failure)

    def _recorded(self) -> Failure | None:
        if self.run_dir is not None and (failure := read_failure(self.run_dir)) is not None:
            return failure
        return Failure.from_json(self._beats.get("failure")) if self._beats.check(["failure"]) else None

    def _find_peers(self) -> None:
        keys = [f"peer/{rank}" for rank in range(self.world_size)]
        if self._peers or not self._beats.check(keys):
            return
        for rank, text in enumerate(self._beats.multi_get(keys)):
            host, pid, host_key = json.loads(text)
            self._peers[rank] = (host, pid)
            if rank != self.rank and host_key == _host_key() and hasattr(os, "pidfd_open"):
                try:
                    self._process_handles[os.pidfd_open(pid)] = rank
                except ProcessLookupError:
                    self._lost_rank(rank, "is gone")

    def _check_processes(self, timeout_s: float) -> None:
        poller = select.poll()
        for handle in self._process_handles:
            poller.register(handle, select.POLLIN)
        for handle, _ in poller.poll(timeout_s * 1000):
            rank = self._process_handles.pop(handle)
            os.close(handle)
            self._lost_rank(rank, "is gone")

    def _check_beats(self) -> None:
        """Rank 0 watches all, the others watch rank 0: n beats a look instead of n squared."""
        if not self._peers:
            return
        watched = [rank for rank in (range(self.world_size) if self.rank == 0 else [0]) if rank != self.rank]
        now = time.monotonic()
        keys = [f"beat/{rank}" for rank in watched]
        if not keys or not self._beats.check(keys):
            return
        for rank, text in zip(watched, self._beats.multi_get(keys), strict=True):
            beat = text.decode()
            if self._seen.get(rank, ("", 0.0))[0] != beat:
                self._seen[rank] = (beat, now)
            elif now - self._seen[rank][1] > self.watchdog_s:
                self._lost_rank(rank, f"has given no sign of life for {self.watchdog_s:g} s (run.watchdog_s)")

    def _check_parts(self) -> None:
        for fault in self._faults:
            what = None if self._is_ending or self.failure is not None else fault()
            if what is not None:
                cause = self._wait_for_cause()  # the main thread may be about to tell of it
                phase = self._phase
                what = f"cannot go on in {phase}: {what}"
                own = Failure(
                    what, self.rank, socket.gethostname(), os.getpid(), phase, time.time(), log=log_path(self.run_dir, self.rank)
                )
                self._notice(cause or self._record(own))

    def _lost_rank(self, rank: int, what: str) -> None:
        if self._is_ending or self.failure is not None or self._beats.check([f"done/{rank}"]):
            return
        cause = self._wait_for_cause()
        if cause is None:
            host, pid = self._peers.get(rank, ("unknown", 0))
            phase = self._phases().get(rank, "unknown")
            what = f"{what}; it was last seen in {phase}"
            cause = self._record(Failure(what, rank, host, pid, phase, time.time(), log=log_path(self.run_dir, rank)))
        self._notice(cause)

    def _lost_store(self, error: RuntimeError) -> None:
        cause = self._wait_for_cause()
        if cause is None:
            host, pid = self._peers.get(0, ("unknown", 0))
            what = f"or its launcher is gone: the rendezvous store that it hosts broke off ({str(error).splitlines()[0]})"
            cause = self._record(Failure(what, 0, host, pid, "unknown", time.time(), log=log_path(self.run_dir, 0)))
        self._notice(cause)

    # -- the first cause ------------------------------------------------------------------------------------------------------

    def _wait_for_cause(self) -> Failure | None:
        deadline = time.monotonic() + CAUSE_WAIT_S
        while self.failure is None:
            try:
                failure = self._recorded()
            except RuntimeError:  # no store any more; the file may still come
                failure = None
            if failure is not None or time.monotonic() > deadline:
                return failure
            time.sleep(0.05)
        return self.failure

    def _record(self, failure: Failure) -> Failure:
        if self.run_dir is not None:
            failure = write_failure(self.run_dir, failure)
        try:
            failure = Failure.from_json(self._beats.compare_set("failure", "", failure.to_json()))
        except RuntimeError as error:
            logger.debug("the store could not take the failure: %s", error)
        self._notice(failure)
        return failure

    def _notice(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
            self._exit_at = time.monotonic() + self.grace_s

    def _phases(self) -> dict[int, str]:
        """What each rank was doing at its last beat."""
        phases = {}
        for rank in range(self.world_size):
            try:
                if self._beats.check([f"beat/{rank}"]):
                    phases[rank] = json.loads(self._beats.get(f"beat/{rank}"))["phase"]
            except RuntimeError:
                break
        return phases

    # -- the thread that ends the process; it waits for nothing ------------------------------------------------------------------

    def _guard(self) -> None:
        while not self._closed.wait(TICK_S):
            now = time.monotonic()
            silence = now - self._last_answer
            if self._exit_at is None and silence > self.watchdog_s and not self._is_ending:
                what = f"had no answer from the rendezvous store for {silence:.0f} s (run.watchdog_s={self.watchdog_s:g})"
                host = socket.gethostname()
                failure = Failure(
                    what, self.rank, host, os.getpid(), self._phase, time.time(), log=log_path(self.run_dir, self.rank)
                )
                self._notice(write_failure(self.run_dir, failure) if self.run_dir is not None else failure)
            if self._exit_at is not None and now > self._exit_at:
                end_process(f"rank {self.rank} was in {self._phase} and ends, since the run has failed: {self.failure}")


def last_phase(store: Store, rank: int) -> str:
    """What a rank was doing at its last beat; for the launcher, once the rank has ended."""
    beats = PrefixStore(STORE_PREFIX, store)
    key = f"beat/{rank}"
    return str(json.loads(beats.get(key))["phase"]) if beats.check([key]) else "start"


def end_process(message: str) -> None:
    """End this process at once, and the processes that it started, whatever its main thread waits for."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    os._exit(1)


def _with_phases(failure: Failure, phases: dict[int, str]) -> Failure:
    """A broken collective has no cause of its own: say where each rank stood, so that the late ones can be seen."""
    where = ", ".join(f"rank {rank} in {phase}" for rank, phase in sorted(phases.items()))
    return Failure(**{**vars(failure), "what": f"{failure.what} ({where})" if where else failure.what})


def _host_key() -> str:
    """Equal for processes that can see each other's process ids."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not Linux
        parts += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return "/".join(parts)
