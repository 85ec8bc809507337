"""May the engine generate now? The states of an engine between start, weight updates, sleep and close; both engines keep one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from megappo.errors import RunFailed

Status = Literal["ready", "synced", "half_updated", "asleep", "closed"]


class EngineState:
    """ready (no weights yet) -> synced (one complete version) -> asleep -> ready (awake, weights given up) -> synced.

    `begin_update` leaves the engine half_updated until `commit`: a failure in between stays visible until an update succeeds.
    What belongs to an update runs in `updating`, which keeps the reason of a failure and lets nothing follow it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.status: Status = "ready"
        self.weight_version: int | None = None
        self._reason = "no weights have been published to it yet; publish them first"
        self._updating: int | None = None

    def require_generate(self) -> int:
        """The version that samples will come from. Raises RunFailed where there is no complete one."""
        if self.status != "synced" or self.weight_version is None:
            raise RunFailed(f"{self.name} cannot generate: {self._reason}")
        return self.weight_version

    def begin_update(self, version: int) -> None:
        """Takes the place of an update that was not finished, if there is one."""
        if self.status in ("asleep", "closed"):
            raise RunFailed(f"{self.name} cannot take weights version {version}: {self._reason}")
        self._leave("half_updated", f"the update to weights version {version} did not complete; publish the weights again")
        self._updating = version

    @contextmanager
    def updating(self) -> Iterator[int]:
        """The version that is on its way. An exception inside ends its update: nothing of it may follow."""
        version = self._updating
        if version is None:
            raise RunFailed(f"{self.name} has no update under way: {self._reason}")
        try:
            yield version
        except BaseException as error:
            if self.status != "closed":
                why = f"the update to weights version {version} failed ({error}); publish the weights again"
                self._leave("half_updated", why)
            raise

    def commit(self) -> None:
        """The version that is on its way is complete."""
        self.status, self.weight_version, self._updating = "synced", self._updating, None

    def sleep(self) -> None:
        if self.status == "closed":
            raise RunFailed(f"{self.name} cannot sleep: {self._reason}")
        self._leave("asleep", "it is asleep; call wake, then publish the weights")

    def wake(self) -> None:
        if self.status == "closed":
            raise RunFailed(f"{self.name} cannot wake: {self._reason}")
        if self.status == "asleep":
            self._leave("ready", "it slept and gave its weights up; publish the weights again")

    def close(self, why: str = "it is closed") -> None:
        if self.status != "closed":
            self._leave("closed", why)

    def _leave(self, status: Status, reason: str) -> None:
        self.status, self.weight_version, self._reason, self._updating = status, None, reason, None
