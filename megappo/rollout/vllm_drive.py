"""How is an update of the weights driven through vLLM? `Updates`: checks, vLLM's own calls, and clean layers after a failure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from megappo.errors import RunFailed
from megappo.pp_weights.update import Update, pack_update
from megappo.rollout.announce import check_announcement
from megappo.rollout.vllm_worker import offers_weight_transfer

Places = Sequence[tuple[str, str]]
"""(path, JSON of the manifest) of a bucket: one for all workers, or one a worker."""


class Calls(Protocol):
    """One way to reach vLLM's workers. What goes wrong in a worker is asked for, `_outcome`, since it must not raise there."""

    def start(self, update: Update) -> None: ...

    def load(self, places: Places) -> None: ...

    def finish(self, version: int) -> int:
        """Returns the bytes that were copied only because vLLM held on to them."""
        ...

    def abandon(self) -> None: ...


class TransferCalls:
    """vLLM's weight-transfer API."""

    def __init__(self, llm: Any, zero_copy: bool) -> None:
        self._llm, self._zero_copy = llm, zero_copy
        self._is_open = False  # vLLM wants a finish for each start

    def start(self, update: Update) -> None:
        self._llm.init_weight_transfer_engine({"init_info": {**pack_update(update), "zero_copy": self._zero_copy}})
        self._llm.start_weight_update()
        self._is_open = True
        _outcome(self._llm)

    def load(self, places: Places) -> None:
        infos = [{"path": path, "manifest": manifest} for path, manifest in places]
        self._llm.update_weights({"update_info": infos if len(infos) > 1 else infos[0]})
        _outcome(self._llm)

    def finish(self, version: int) -> int:
        self._close()
        cloned_bytes = _outcome(self._llm)
        self._llm.update_weight_version(str(version))
        return cloned_bytes

    def abandon(self) -> None:
        self._llm.collective_rpc("megappo_abandon")
        if self._is_open:
            self._close()

    def _close(self) -> None:
        self._is_open = False
        self._llm.finish_weight_update()


class ExtensionCalls:
    """Methods of our worker extension, for a vLLM without that API."""

    def __init__(self, llm: Any, zero_copy: bool) -> None:
        self._llm, self._zero_copy = llm, zero_copy

    def start(self, update: Update) -> None:
        self._llm.collective_rpc("megappo_start", args=(pack_update(update), self._zero_copy))
        _outcome(self._llm)

    def load(self, places: Places) -> None:
        self._llm.collective_rpc("megappo_take", args=places[0])
        _outcome(self._llm)

    def finish(self, version: int) -> int:
        self._llm.collective_rpc("megappo_finish")
        return _outcome(self._llm)

    def abandon(self) -> None:
        self._llm.collective_rpc("megappo_abandon")


def _outcome(llm: Any) -> int:
    """Bytes copied so far, of all workers. Raises RunFailed where the update has failed in one."""
    outcomes = llm.collective_rpc("megappo_outcome")
    for failure, _ in outcomes:
        if failure is not None:
            raise RunFailed(failure)
    return sum(cloned_bytes for _, cloned_bytes in outcomes)


class Updates:
    """The updates of one vLLM. After an exception nothing is under way, and `start` may be called for the next."""

    def __init__(self, llm: Any, tp: int, zero_copy: bool) -> None:
        self._llm, self._tp = llm, tp
        self._calls: Calls = (TransferCalls if offers_weight_transfer() else ExtensionCalls)(llm, zero_copy)
        self.expected: dict[str, tuple[int, ...]] = llm.collective_rpc("megappo_expected_weights")[0]
        self._version: int | None = None
        self._kv_cache_is_clean = True  # a failed update leaves layers that may have answered with NaN

    def start(self, update: Update) -> None:
        if self._version is not None:  # the trainer has given it up
            self._abandon()
        if self._llm.llm_engine.has_unfinished_requests():
            raise RunFailed(f"weights version {update.version} is refused: requests are running; update between generate calls")
        if update.shards not in (1, self._tp):
            raise RunFailed(f"weights version {update.version} comes in {update.shards} shards, the engine has tp={self._tp}")
        check_announcement(update, self.expected, "vLLM")
        self._version = update.version
        with self._clean_on_failure():
            self._calls.start(update)

    def load(self, places: Places) -> None:
        with self._clean_on_failure():
            self._calls.load(places)

    def finish(self) -> int:
        """Put the version in force. Returns what `Calls.finish` does."""
        with self._clean_on_failure() as version:
            # keys and values of the old weights must never meet a new prompt
            if not self._llm.reset_prefix_cache():
                raise RunFailed("vLLM did not reset its prefix cache: requests are still running")
            cloned_bytes = self._calls.finish(version)
            if not self._kv_cache_is_clean:
                self._llm.collective_rpc("megappo_clear_kv_cache")
            self._version, self._kv_cache_is_clean = None, True
        return cloned_bytes

    @contextmanager
    def _clean_on_failure(self) -> Iterator[int]:
        if self._version is None:
            raise RunFailed("no update of the weights is under way")
        try:
            yield self._version
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        self._version, self._kv_cache_is_clean = None, False
        self._calls.abandon()
