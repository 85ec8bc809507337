"""How do the ranks of a run on one machine come to life, and how do they end? `launch_local`.

The heavy modules are imported once, then the ranks are forked. The launcher hosts the rendezvous store on a port that the system
chose, so two runs never meet. The first rank that fails ends the run, and whatever a rank has started ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection, get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil

from megappo.config.schema import RunConfig
from megappo.controller.failure import (
    Failure,
    discard_failure,
    failure_of,
    is_consequence,
    log_path,
    read_failure,
    write_failure,
)
from megappo.controller.rendezvous import detect_launcher, join_world, store_prefix
from megappo.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["join_world", "launch_local", "run_on_ranks", "speaks_for_all"]
logger = logging.getLogger("megappo")

END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
ASK_TO_END_S = 3.0  # between SIGTERM and SIGKILL
NORMAL_END_S = 60.0  # between the driver's end and the last rank's
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def speaks_for_all(run: RunConfig) -> bool:
    """Whether this process does what is to be done once: the command that starts the ranks, or rank 0 of those that torchrun
    has started. Raises UserError where the environment does not fit run.launcher."""
    return detect_launcher(run.launcher, os.environ) == "local" or os.environ["RANK"] == "0"


def run_on_ranks(
    run: RunConfig, world_size: int, entry: Callable[[], int], run_dir: str | Path, preload: Callable[[], None]
) -> int:
    """Run `entry` on every rank: in this process where it is one of torchrun's ranks, else as `launch_local` does."""
    if detect_launcher(run.launcher, os.environ) == "torchrun":
        return entry()
    return launch_local(world_size, entry, run_dir, threads=run.threads_per_rank, preload=preload)


def launch_local(
    world_size: int,
    entry: Callable[[], int],
    run_dir: str | Path,
    threads: int = 1,
    preload: Callable[[], None] | None = None,
    grace_s: float = 5.0,
) -> int:
    """Run `entry` in `world_size` forked ranks of this machine and wait for them. To be called from the main thread.

    Each rank finds torchrun's variables and OMP_NUM_THREADS in its environment (see `join_world`). Rank 0 keeps the terminal; the
    others write to `{run_dir}/logs/rank_00001.log`.
    preload: imports what all ranks need, here, once; it must not touch a GPU.
    grace_s: after the first failure the others have this long to end by themselves.

    Returns 0, or 128 + the signal that ended the run. Raises UserError or RunFailed with the first cause. Leaves nothing running.
    """
    run_dir = Path(run_dir)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    discard_failure(run_dir, older_than=float("inf"))
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, 2 * world_size))
    environment = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        "OMP_NUM_THREADS": str(threads),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # torch's word for: the launcher hosts the store
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),  # else gloo asks what the host's name resolves to
    }
    with _environment(environment), listener:
        import torch  # here, so that the ranks share it; OMP_NUM_THREADS is read by this import

        if preload is not None:
            preload()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise RuntimeError("the launcher must not touch CUDA before it forks the ranks: preload may only import")
        with _Signals() as signals, _no_orphans():
            ranks: dict[int, ForkProcess] = {}  # by a handle that becomes readable when the rank ends
            try:
                for rank in range(world_size):
                    process = _start_rank(rank, entry, run_dir, threads, listener)
                    # Not the process's sentinel: a child that a rank has forked would keep that open.
                    ranks[os.pidfd_open(_pid(process))] = process
                # The server's threads start after the forks; until then the ranks' connections queue at the listener.
                port = listener.getsockname()[1]
                host = torch.distributed.TCPStore(  # type: ignore[attr-defined]
                    "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
                )
                store = torch.distributed.PrefixStore(store_prefix(environment), host)  # type: ignore[attr-defined]
                failure = _supervise(ranks, store, run_dir, signals, grace_s)
            finally:
                for handle, process in ranks.items():  # none but after an error of the launcher itself
                    _kill_group(process)
                    process.join()
                    os.close(handle)
    if signals.received:
        logger.error("the run was ended by %s", signal.Signals(signals.received[0]).name)
        return 128 + signals.received[0]
    if failure is not None:
        raise failure.error()
    return 0


def _supervise(ranks: dict[int, ForkProcess], store: Store, run_dir: Path, signals: _Signals, grace_s: float) -> Failure | None:
    """Wait until all ranks have ended, by themselves or not, and take them out of `ranks`. Returns the first cause, if any.

    A deadline is set by the first failure, by the driver's end, or by a signal; past it the ranks that are left get SIGTERM, then
    SIGKILL."""
    failure: Failure | None = None
    deadline, next_signal = float("inf"), signal.SIGTERM
    while ranks:
        timeout_s = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        ready = connection.wait([*ranks, signals.reader], timeout_s)
        ended = [(handle, ranks.pop(handle)) for handle in list(ranks) if handle in ready]
        for handle, process in ended:
            _kill_group(process)  # what it has left behind; its process id is its own until it is joined
            process.join()
            os.close(handle)
        for _, process in sorted(
            ended, key=lambda pair: pair[1].exitcode or 0
        ):  # signals first: others may have followed from them
            code, rank = process.exitcode or 0, _rank(process)
            if code != 0 and failure is None:
                what = f"was ended by {_signal_name(code)}" if code < 0 else f"ended with exit code {code}"
                failure = _record(what, process, store, run_dir)
                deadline = time.monotonic() + grace_s
            if rank == 0:  # the others have nothing of their own to finish
                deadline = min(deadline, time.monotonic() + (NORMAL_END_S if failure is None else 0.0))
        if signals.drain():
            name = signal.Signals(signals.received[0]).name
            what = f"the run was ended by {name}"
            failure = write_failure(run_dir, Failure(what, None, socket.gethostname(), os.getpid(), "", time.time()))
            deadline, next_signal = time.monotonic(), signal.SIGTERM if len(signals.received) == 1 else signal.SIGKILL
        if ranks and time.monotonic() >= deadline:
            if failure is None:
                what = f"did not end within {NORMAL_END_S:g} s of the driver's end"
                failure = _record(what, min(ranks.values(), key=_rank), store, run_dir)
            for process in ranks.values():
                if next_signal is signal.SIGTERM:
                    os.kill(_pid(process), signal.SIGTERM)
                else:
                    _kill_group(process)
            deadline = time.monotonic() + ASK_TO_END_S if next_signal is signal.SIGTERM else float("inf")
            next_signal = signal.SIGKILL
    return failure


def _record(what: str, process: ForkProcess, store: Store, run_dir: Path) -> Failure:
    """The first cause: what the rank recorded itself, or this."""
    from megappo.controller.watchdog import last_phase

    recorded = read_failure(run_dir)
    if recorded is not None:
        return recorded
    rank = _rank(process)
    phase = last_phase(store, rank)
    what, log = f"{what}; it was last seen in {phase}", log_path(run_dir, rank)
    return write_failure(run_dir, Failure(what, rank, socket.gethostname(), _pid(process), phase, time.time(), log=log))


def _signal_name(code: int) -> str:
    name = signal.Signals(-code).name
    return f"{name} (the kernel sends it where memory runs out)" if name == "SIGKILL" else name


# -- a rank ---------------------------------------------------------------------------------------------------------------------


def _start_rank(rank: int, entry: Callable[[], int], run_dir: Path, threads: int, listener: socket.socket) -> ForkProcess:
    process = get_context("fork").Process(
        target=_rank_main, args=(rank, entry, run_dir, threads, listener, os.getpid()), name=str(rank)
    )
    process.start()
    return process


def _rank_main(
    rank: int, entry: Callable[[], int], run_dir: Path, threads: int, listener: socket.socket, launcher_pid: int
) -> None:
    os.setsid()  # a process group of its own: what it starts can be ended with it, and Ctrl-C reaches the launcher alone
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        os._exit(1)  # the launcher ended before the line above
    for number in END_SIGNALS:
        signal.signal(number, _leave)
    listener.close()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    import torch

    torch.set_num_threads(threads)
    _open_log(rank, run_dir)
    try:
        code = entry()
    except Exception as error:  # noqa: BLE001 - recorded, and the exit code tells
        failure = read_failure(run_dir)
        if failure is None and is_consequence(error):
            time.sleep(1.0)  # for the cause to be recorded
        failure = write_failure(run_dir, failure_of(error, rank, "start", run_dir))
        if failure.rank == rank and not failure.is_user_error:
            logger.error("rank %d:\n%s", rank, failure.traceback.rstrip())
        code = 2 if isinstance(error, UserError) else 1
    sys.exit(code)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # unwinds: engines are closed, files written


def _open_log(rank: int, run_dir: Path) -> None:
    """Rank 0 keeps the terminal and copies its log lines to its file; everything that another rank writes goes to its file."""
    path = log_path(run_dir, rank)
    handler: logging.Handler
    if rank == 0:
        handler = logging.FileHandler(path)
        logger.addHandler(handler)
    else:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        handler = logging.StreamHandler(sys.stderr)
        logger.handlers, logger.propagate = [handler], False  # the launcher's handlers are the terminal's
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))


# -- the launcher's surroundings --------------------------------------------------------------------------------------------


class _Signals:
    """SIGTERM, SIGINT and SIGHUP of the launcher, kept for `_supervise`; the file descriptor `reader` wakes it."""

    def __enter__(self) -> _Signals:
        self.received: list[int] = []
        self.reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = {number: signal.signal(number, self._take) for number in END_SIGNALS}
        return self

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        os.write(self._writer, b".")

    def drain(self) -> bool:
        """Whether a signal came since the last call."""
        try:
            return bool(os.read(self.reader, 100))
        except BlockingIOError:
            return False

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.reader)
        os.close(self._writer)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _no_orphans() -> Iterator[None]:
    """A process whose parent ended inside this block becomes our child, so that it is found and ended at the end of the block."""
    before = set(psutil.Process().children())
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        while left := [child for child in psutil.Process().children() if child not in before]:
            for process in [*left, *(grandchild for child in left for grandchild in _children(child))]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, timeout=1.0)
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _kill_group(process: ForkProcess) -> None:
    """End a rank and its process group; only before the rank is joined, while its process id cannot be another's."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(_pid(process), signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(_pid(process), signal.SIGKILL)  # it may not have come to make its group


def _rank(process: ForkProcess) -> int:
    return int(process.name)


def _pid(process: ForkProcess) -> int:
    assert process.pid is not None
    return process.pid


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
