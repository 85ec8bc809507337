"""What ended the run? The first cause, as one record that every process agrees on: `failure.json` in the run folder.

The first to write wins. A rank whose collective broke because another rank is gone tells of a consequence, not of the cause: it
waits a moment for the cause to be written (`is_consequence`).
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from megappo.errors import PeerFailed, RunFailed, UserError

FILE_NAME = "failure.json"
LOST_PEER_WORDS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "timed out waiting",
    "nccl",
    "communicator was aborted",
)


@dataclass(frozen=True)
class Failure:
    """One rank's end. `str(failure)` is the whole message, one line but for what the error itself says.

    what: what happened, e.g. "failed in actor.update: ValueError: no rows".
    rank: None where the run as a whole was ended.
    is_user_error: the user can mend it (UserError); the run then ends with exit code 2.
    """

    what: str
    rank: int | None
    host: str
    pid: int
    phase: str
    time: float
    traceback: str = ""
    log: str = ""
    is_user_error: bool = False

    def __str__(self) -> str:
        if self.is_user_error or self.rank is None:
            return self.what
        return f"rank {self.rank} (host {self.host}, pid {self.pid}) {self.what}" + (f"; log: {self.log}" if self.log else "")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Failure:
        return cls(**json.loads(text))

    def error(self) -> Exception:
        """The exception that tells of this failure: UserError, or RankFailed."""
        return UserError(self.what) if self.is_user_error else RankFailed(self)


class RankFailed(RunFailed):
    """RunFailed that carries the first cause."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure
        if failure.traceback:
            self.add_note(f"On rank {failure.rank}:\n{failure.traceback}")

    def __reduce__(self) -> tuple[type[RankFailed], tuple[Failure]]:
        return RankFailed, (self.failure,)


def failure_of(error: BaseException, rank: int, phase: str, run_dir: Path | None) -> Failure:
    """The record of an exception on this rank; of a RankFailed the failure that it carries."""
    if isinstance(error, RankFailed):
        return error.failure
    is_user_error = isinstance(error, UserError)
    text = str(error)
    if not isinstance(error, RunFailed):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Failure(
        what=str(error) if is_user_error else f"failed in {phase}: {text}",
        rank=rank,
        host=socket.gethostname(),
        pid=os.getpid(),
        phase=phase,
        time=time.time(),
        traceback="".join(traceback.format_exception(error)),
        log=log_path(run_dir, rank),
        is_user_error=is_user_error,
    )


def is_consequence(error: BaseException) -> bool:
    """Whether an exception looks like the loss of another rank rather than a fault of this one."""
    if isinstance(error, PeerFailed):
        return True
    text = str(error).lower()
    return isinstance(error, (RuntimeError, ConnectionError)) and any(words in text for words in LOST_PEER_WORDS)


def log_path(run_dir: Path | None, rank: int) -> str:
    return "" if run_dir is None else str(run_dir / "logs" / f"rank_{rank:05d}.log")


def write_failure(run_dir: Path, failure: Failure) -> Failure:
    """Record the failure unless one is recorded already; returns the recorded one, the first cause."""
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        handle = os.open(run_dir / FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return read_failure(run_dir) or failure
    with os.fdopen(handle, "w") as file:
        file.write(failure.to_json() + "\n")
    return failure


def read_failure(run_dir: Path) -> Failure | None:
    """The recorded first cause, if any."""
    for _ in range(50):
        try:
            text = (run_dir / FILE_NAME).read_text()
        except FileNotFoundError:
            return None
        if text.endswith("\n"):
            return Failure.from_json(text)
        time.sleep(0.01)  # its writer is between creating and filling it
    return None


def discard_failure(run_dir: Path, older_than: float) -> None:
    """Remove the record of a former run in this folder: one written before `older_than` (seconds since the epoch)."""
    path = run_dir / FILE_NAME
    if path.exists() and path.stat().st_mtime < older_than:
        path.unlink(missing_ok=True)
