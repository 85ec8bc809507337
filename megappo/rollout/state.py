"""May the engine generate now? The states of an engine between start, weight updates, sleep and close; both engines keep one."""

from __future__ import annotations

from typing import Literal

from megappo.errors import RunFailed

Status = Literal["ready", "synced", "half_updated", "asleep", "closed"]


class EngineState:
    """ready (no weights yet) -> synced (one complete version) -> asleep -> ready (awake, weights given up) -> synced.

    `begin_update` leaves the engine half_updated until `commit`: a failure in between stays visible until an update succeeds.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.status: Status = "ready"
        self.weight_version: int | None = None
        self._reason = "no weights have been published to it yet; call update_weights first"

    def require_generate(self) -> int:
        """The version that samples will come from. Raises RunFailed where there is no complete one."""
        if self.status != "synced" or self.weight_version is None:
            raise RunFailed(f"{self.name} cannot generate: {self._reason}")
        return self.weight_version

    def begin_update(self, version: int) -> None:
        if self.status in ("asleep", "closed"):
            raise RunFailed(f"{self.name} cannot take weights version {version}: {self._reason}")
        self._leave("half_updated", f"the update to weights version {version} did not complete; publish the weights again")

    def fail_update(self, version: int, why: str) -> None:
        self._leave("half_updated", f"the update to weights version {version} failed ({why}); publish the weights again")

    def commit(self, version: int) -> None:
        self.status, self.weight_version = "synced", version

    def sleep(self) -> None:
        if self.status == "closed":
            raise RunFailed(f"{self.name} cannot sleep: {self._reason}")
        self._leave("asleep", "it is asleep; call wake, then update_weights")

    def wake(self) -> None:
        if self.status == "closed":
            raise RunFailed(f"{self.name} cannot wake: {self._reason}")
        if self.status == "asleep":
            self._leave("ready", "it slept and gave its weights up; call update_weights after wake")

    def close(self, why: str = "it is closed") -> None:
        if self.status != "closed":
            self._leave("closed", why)

    def _leave(self, status: Status, reason: str) -> None:
        self.status, self.weight_version, self._reason = status, None, reason
