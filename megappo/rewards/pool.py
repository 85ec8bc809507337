"""How does reward code run without harm to the driver? `RewardPool`: worker processes, a time limit a call, replacements.

A worker has one call at a time: the time of a call is the time since it was sent, and a worker that dies or is killed takes one
call with it. No thread is involved: all happens in `run`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from megappo.errors import RunFailed, UserError
from megappo.rewards.call import Outcome, ScoreRequest, failed
from megappo.rewards.parts import Part

SHORTEST_LOADING_S = 60.0
"""Imports may take this long even where reward.timeout_s is shorter."""
_LAST_WORDS_S = 1.0  # for a worker that was told to end, or has hung up, to run its exit handlers


class RewardPool:
    """Processes that have loaded the functions of some parts. Construction starts them and waits until all have.

    timeout_s: longest call. log_path: file that takes what the workers print; None: stderr.
    Raises UserError where a function cannot be loaded."""

    def __init__(self, parts: Sequence[Part], num_workers: int, timeout_s: float, log_path: Path | None = None) -> None:
        self._parts = tuple(parts)
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._loading_s = max(timeout_s, SHORTEST_LOADING_S)
        self._log_path = log_path
        self._workers: list[_Worker] = []
        try:
            self._start_missing()
            while loading := [worker for worker in self._workers if not worker.ready]:
                for worker in _reported(loading):
                    worker.finish_loading()
        except BaseException:
            self.close()
            raise

    def run(self, part: int, requests: Mapping[int, ScoreRequest]) -> Generator[tuple[int, Outcome], None, None]:
        """Call a part (by its place among the parts) on each request, as many at once as there are workers. Yields (key of the
        request, outcome) as they come; closed early, it ends what is under way. Raises RunFailed where a worker cannot be
        replaced."""
        waiting = deque(requests.items())
        try:
            while waiting or any(worker.call is not None for worker in self._workers):
                self._start_missing()
                for worker in self._workers:
                    if worker.ready and worker.call is None and waiting:
                        key, request = waiting.popleft()
                        if (problem := worker.send(key, part, request, self._timeout_s)) is not None:
                            yield key, failed(problem)
                for worker in _reported([worker for worker in self._workers if not worker.ready or worker.call is not None]):
                    if not worker.ready:
                        _finish_replacing(worker)
                    elif (at := worker.call) is not None:
                        yield at, worker.outcome() or failed(self._lost(worker))
        finally:
            for worker in [worker for worker in self._workers if worker.call is not None]:  # the caller wants no more of it
                self._end(worker, grace_s=0.0)

    def close(self) -> None:
        """End the workers and whatever their code has started."""
        for worker in self._workers:
            worker.connection.close()  # all at once, so that they end side by side
        for worker in list(self._workers):
            self._end(worker, 0.0 if worker.call is not None or not worker.ready else _LAST_WORDS_S)

    def _start_missing(self) -> None:
        """A new worker loads while the others go on."""
        while len(self._workers) < self._num_workers:
            self._workers.append(_Worker(self._parts, self._loading_s, self._log_path))

    def _end(self, worker: _Worker, grace_s: float) -> int:
        self._workers.remove(worker)
        return worker.end(grace_s)

    def _lost(self, worker: _Worker) -> str:
        """End a worker that was too slow or has hung up. Returns what happened, in words."""
        if time.monotonic() >= worker.deadline:
            self._end(worker, grace_s=0.0)
            return f"took longer than reward.timeout_s={self._timeout_s:g}"
        return f"ended its process with {_exit_text(self._end(worker, _LAST_WORDS_S))}"


def _reported(workers: list[_Worker]) -> list[_Worker]:
    """Wait until some of the workers have sent something, have ended, or are past their deadline; those."""
    if not workers:
        return []
    first = min(worker.deadline for worker in workers)
    ready = wait([worker.connection for worker in workers], timeout=max(0.0, first - time.monotonic()))
    now = time.monotonic()
    return [worker for worker in workers if worker.connection in ready or worker.deadline <= now]


def _finish_replacing(worker: _Worker) -> None:
    try:
        worker.finish_loading()
    except UserError as error:  # it could be loaded before: the file has changed, or the machine is at its end
        why = "; ".join(str(error).splitlines())
        raise RunFailed(f"a reward worker had to be replaced, and its successor cannot be started: {why}") from error


class _Worker:
    """One process. ready: its functions are loaded. call: key of the request that it is at. deadline: of that, or of loading."""

    def __init__(self, parts: Sequence[Part], loading_s: float, log_path: Path | None) -> None:
        self.parts = parts
        self.ready = False
        self.call: int | None = None
        self.deadline = time.monotonic() + loading_s
        self.loading_s = loading_s
        ours, theirs = socket.socketpair()
        # the kernel's death signal follows the thread that forks, so it is safe only from the main thread
        from_main = threading.current_thread() is threading.main_thread()
        arguments = ["--fd", str(theirs.fileno()), "--parent", str(os.getpid()), "--kernel-signal", str(int(from_main))]
        with theirs, _log(log_path) as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "megappo.rewards.worker", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C does not reach it, and what it starts can be ended with it
            )
        self.connection = Connection(ours.detach())
        with contextlib.suppress(ConnectionError):  # it has ended already; `finish_loading` finds out
            self.connection.send([part.function for part in parts])

    def finish_loading(self) -> None:
        """Take the worker's report. Raises UserError where it could not load a function, ended, or is past its deadline."""
        names = ", ".join(part.shown for part in self.parts)
        try:
            if not self.connection.poll():
                raise UserError(f"{names}: importing took longer than {self.loading_s:g} s; do slow things in the first call")
            refused = self.connection.recv()
        except (EOFError, ConnectionError):
            raise UserError(f"{names}: importing ended the process with {_exit_text(self.end(_LAST_WORDS_S))}; mend it") from None
        problems = [f"{part.shown}: {refused[part.function]}" for part in self.parts if part.function in refused]
        if problems:
            raise UserError("\n".join(problems))
        self.ready = True

    def send(self, key: int, part: int, request: ScoreRequest, timeout_s: float) -> str | None:
        """Start a call. Returns None, or what is wrong with it where it cannot be sent."""
        try:
            message = pickle.dumps((part, request))
        except Exception as error:  # noqa: BLE001 - a row can hold any object, and pickling raises what it likes
            return f"cannot be given the row, which does not pickle ({type(error).__name__}: {error}),"
        self.call, self.deadline = key, time.monotonic() + timeout_s
        with contextlib.suppress(ConnectionError):  # it has ended since its last call; `outcome` finds out
            self.connection.send_bytes(message)
        return None

    def outcome(self) -> Outcome | None:
        """What the call came to; None where there is no answer, because the worker has ended or is too slow."""
        try:
            if not self.connection.poll():
                return None
            value, problem = self.connection.recv()
        except (EOFError, ConnectionError):
            return None
        self.call = None
        return Outcome(value, problem)

    def end(self, grace_s: float) -> int:
        """Hang up, wait, and kill it with its process group. Returns the exit code. It is reaped last, so its id stays ours."""
        if self.process.returncode is not None:
            return self.process.returncode
        self.connection.close()
        deadline = time.monotonic() + grace_s
        while os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):  # it may not have come to make its group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        return self.process.wait()


def _exit_text(code: int) -> str:
    """`exit code 3`, or `SIGSEGV`."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    paths = filter(None, (root, os.environ.get("PYTHONPATH")))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def _log(path: Path | None) -> Iterator[int]:
    """File descriptor for what a worker prints: the log, or this process's stderr."""
    if path is None:
        yield 2
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        yield file.fileno()
