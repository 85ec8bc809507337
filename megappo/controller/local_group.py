"""How does the driver in rank 0's process call methods on all ranks? Over sockets: send to all, do its own share, collect.

Idle ranks wait in `serve` on their socket, never inside a collective. A call costs a header for each rank, and the rows' bytes
where the rank does not map them (`shared_rows`).
The port and a token of this run are published in the rendezvous store; whoever does not know the token is not heard.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
import zmq
from torch import Tensor

from megappo.controller.colocate import ColocatedWorker
from megappo.controller.dispatch import Dispatch, check_world, collectors, dispatch_mode, rows_of_ranks
from megappo.controller.failure import Failure, failure_of
from megappo.controller.host_memory import door, stands_open
from megappo.controller.shared_rows import MappedRows, Part, PartKey, Place, SharedRows
from megappo.controller.sockets import receive_frames, send_frames, set_options
from megappo.controller.watchdog import Watchdog
from megappo.controller.wire import decode, encode, plain
from megappo.controller.worker import Tensors, join_rows, num_rows, perform
from megappo.errors import RunFailed
from megappo.parallel_state.layout import ParallelLayout

logger = logging.getLogger("megappo")

NEAR, FAR = b"near", b"far"  # a rank's first word: whether it can map the driver's memory


class LocalWorkerGroup:
    """The driver's end. World size 1 needs no watchdog and opens no socket.

    layouts: layout of each role; a role that is only called by Dispatch.ALL needs none.
    worker: this process's own worker, rank 0's.
    ranks: where each role lives, ascending; a role that is not named lives on all ranks.
    """

    def __init__(
        self,
        layouts: Mapping[str, ParallelLayout],
        worker: ColocatedWorker,
        watchdog: Watchdog | None = None,
        name: str = "controller",
        start_timeout_s: float = 600.0,
        ranks: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.world_size = watchdog.world_size if watchdog else 1
        self._ranks_of_roles = dict(ranks or {})
        if watchdog and watchdog.rank != 0:
            raise ValueError(f"the driver runs on rank 0, not on rank {watchdog.rank}")
        for role, layout in layouts.items():
            check_world(layout, len(self.ranks_of(role)))
        self.layouts, self.worker, self._watchdog = dict(layouts), worker, watchdog
        self._call_number = 0
        self._failure: Failure | None = None
        self._is_over = False
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._identities: dict[int, bytes] = {}
        self._ranks: dict[bytes, int] = {}
        self._shared = SharedRows()
        if watchdog and self.world_size > 1:
            with watchdog.phase("waiting for the other ranks"):
                self._meet(watchdog, name, start_timeout_s)

    def ranks_of(self, role: str) -> Sequence[int]:
        """Where a role lives."""
        return self._ranks_of_roles.get(role, range(self.world_size))

    def call(
        self,
        role: str,
        method: str,
        /,
        tensors: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
        **kwargs: Any,
    ) -> Any:
        """See WorkerGroup.call. Workers get copies (on write, where mapped) or received bytes, never the memory of `tensors`."""
        if self._failure is not None:
            raise self._failure.error()
        what, ranks = f"{role}.{method}", self.ranks_of(role)
        # A role that the driver's own rank does not have has no rows to split: its layout would be that of the first ranks.
        mode = dispatch_mode(self.worker.method(role, method)) if 0 in ranks else Dispatch.ALL
        kwargs = plain(kwargs, f"the arguments of {what}")
        if mode is Dispatch.DP:
            if not isinstance(tensors, Mapping):
                raise ValueError(f"{what} is split by rows: it needs tensors")
            if role not in self.layouts:
                raise ValueError(f"{what} is split by rows: the group was given no layout of the role {role!r}")
            rows = rows_of_ranks(self.layouts[role], num_rows(tensors))
            parts: Sequence[Part] = [Part(tensors, slices) for slices in rows]
            collecting: Sequence[int] = collectors(self.layouts[role])
        else:
            collecting = ranks
            each = [tensors] * len(ranks) if tensors is None or isinstance(tensors, Mapping) else tensors
            parts = [Part(own, None) for own in each]
            if len(parts) != len(ranks):
                raise ValueError(f"{what} was given tensors for {len(parts)} ranks; {role!r} lives on {len(ranks)}")

        self._call_number += 1
        header = {"call": self._call_number, "role": role, "method": method, "kwargs": kwargs, "has_tensors": tensors is not None}
        part_of = dict(zip(ranks, parts, strict=True))
        places = self._shared.lay(part_of)
        self._send_to_others(header, part_of, places, collecting)
        results: dict[int, tuple[Any, Tensors | None]] = {}
        if 0 in ranks:
            try:
                with _phase(self._watchdog, what):
                    own = self._shared.own_rows(part_of[0], places)
                    results[0] = perform(self.worker, role, method, own, kwargs, 0 in collecting)
            except Exception as error:
                raise self._failed(self._own_failure(error, what)) from error
            del own
            self._shared.sweep()
        with _phase(self._watchdog, f"waiting for {what}"):
            results.update(self._collect(what, ranks))
        if mode is not Dispatch.DP:
            return [value if found is None else (found, value) for value, found in (results[rank] for rank in collecting)]
        joined = join_rows([results[rank][1] or {} for rank in collecting], what)
        ids = "sample_ids"
        if isinstance(tensors, Mapping) and ids in joined and ids in tensors and not torch.equal(joined[ids], tensors[ids]):
            raise RunFailed(f"{what} returned its rows in another order than it got them ({ids} differ)")
        return joined, results[collecting[0]][0]

    def close(self) -> None:
        """Tell all ranks that the run is over. After a failure the sockets are just closed."""
        if self._context.closed:
            return
        try:
            if self._failure is None and not self._is_over:
                self._call_number += 1
                for rank in self._identities:
                    self._send(rank, encode({"call": self._call_number, "stop": True}))
                with _phase(self._watchdog, "waiting for the other ranks to end"):
                    self._collect("stop", self._identities)
                if self._watchdog:
                    self._watchdog.expect_end()
        finally:
            self._is_over = True
            self._shared.close()
            self._context.destroy(linger=0)

    def __enter__(self) -> LocalWorkerGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and self._failure is None:  # the driver's own; the others hear of it from their watchdogs
            self._failure = self._own_failure(error, "the driver")
        self._is_over = error is not None
        self.close()

    # -- meeting ------------------------------------------------------------------------------------------------------------

    def _meet(self, watchdog: Watchdog, name: str, timeout_s: float) -> None:
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        set_options(self._socket)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1" if address in ("127.0.0.1", "localhost") else "tcp://*")
        token = secrets.token_hex(16)
        with door(token) as path:
            watchdog.store.set(f"megappo/{name}", json.dumps({"host": address, "port": port, "token": token, "door": path}))
            self._hear_of_all(watchdog, token, port, timeout_s)
        self._ranks = {identity: rank for rank, identity in self._identities.items()}

    def _hear_of_all(self, watchdog: Watchdog, token: str, port: int, timeout_s: float) -> None:
        expected = {_identity(token, rank): rank for rank in range(1, self.world_size)}
        deadline = time.monotonic() + timeout_s
        while len(self._identities) < len(expected):
            if time.monotonic() > deadline:
                late = sorted(set(expected.values()) - set(self._identities))
                raise RunFailed(f"ranks {late} did not report to the driver within {timeout_s:g} s; see their logs")
            frames = receive_frames(self._socket)
            if frames is None:
                if watchdog.failure is not None:
                    raise self._failed(watchdog.failure)
                continue
            identity = frames[0].bytes
            if identity in expected:
                self._identities[expected[identity]] = identity
                if frames[1].bytes == NEAR:
                    self._shared.near.add(expected[identity])
            else:
                logger.warning("a stranger without this run's token spoke to the driver's port %d; it is not heard", port)

    # -- sending and collecting -----------------------------------------------------------------------------------------------

    def _send_to_others(
        self,
        header: dict[str, Any],
        part_of: Mapping[int, Part],
        places: Mapping[PartKey, Place],
        collecting: Sequence[int],
    ) -> None:
        encoded: dict[tuple[Any, ...], list[Any]] = {}  # the ranks of one data-parallel rank share their frames
        for rank, part in part_of.items():
            if rank == 0:
                continue
            place = places.get(part.key) if rank in self._shared.near else None
            own = {"collect": rank in collecting, "place": place}
            key = (part.key, *(bool(value) for value in own.values()))
            if key not in encoded:
                encoded[key] = encode({**header, **own}, part.cut() if place is None else None)
            self._send(rank, encoded[key])

    def _send(self, rank: int, frames: list[Any]) -> None:
        try:
            send_frames(self._socket, [self._identities[rank], *frames])
        except zmq.ZMQError as error:  # EHOSTUNREACH: the rank has closed its socket
            lost = ConnectionResetError(f"connection reset by peer: rank {rank} has left the run ({error})")
            raise self._failed(self._own_failure(lost, "a call")) from error

    def _collect(self, what: str, ranks: Iterable[int]) -> dict[int, tuple[Any, Tensors | None]]:
        """The answers of these ranks but the driver's. Raises the first cause once one reports a failure or the watchdog knows of
        one."""
        results: dict[int, tuple[Any, Tensors | None]] = {}
        awaited = set(ranks) - {0}
        while results.keys() != awaited:
            frames = receive_frames(self._socket)
            if frames is None:
                if self._watchdog and self._watchdog.failure is not None:
                    raise self._failed(self._watchdog.failure)
                continue
            identity = frames[0].bytes
            if identity not in self._ranks:
                logger.warning("a stranger without this run's token spoke to the driver; it is not heard")
                continue
            rank = self._ranks[identity]
            header, found = decode(frames[1:])
            if "failure" in header:
                raise self._failed(Failure.from_json(header["failure"]))
            if header["call"] != self._call_number:
                raise RunFailed(f"rank {rank} answered call {header['call']} while {what} is call {self._call_number}")
            self._shared.answered(rank, header["held"])
            results[rank] = header["value"], found if header["has_tensors"] else None
        return results

    def _own_failure(self, error: BaseException, what: str) -> Failure:
        return self._watchdog.fail(error) if self._watchdog else failure_of(error, 0, what, None)

    def _failed(self, failure: Failure) -> Exception:
        """Nothing can be called any more: other ranks may be stuck in the middle of the call."""
        self._failure = failure
        if failure.traceback and failure.rank != 0:
            logger.error("rank %s:\n%s", failure.rank, failure.traceback.rstrip())
        return failure.error()


def serve(
    worker: ColocatedWorker,
    watchdog: Watchdog,
    name: str = "controller",
    start_timeout_s: float = 600.0,
    maps_rows: bool = True,
) -> None:
    """Carry out the driver's calls on this rank until it says stop. Raises what a method raised, once the driver knows of it.

    maps_rows: false where this rank shall get its rows over the socket though it may be on the driver's host."""
    if watchdog.rank == 0:
        raise ValueError("rank 0 is the driver; the other ranks serve")
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        with watchdog.phase("waiting for the driver"):
            meeting = _wait_for_driver(watchdog, f"megappo/{name}", start_timeout_s)
        socket.setsockopt(zmq.IDENTITY, _identity(meeting["token"], watchdog.rank))
        set_options(socket)
        host = meeting["host"]
        socket.connect(f"tcp://{'[' + host + ']' if ':' in host else host}:{meeting['port']}")
        socket.send(NEAR if maps_rows and stands_open(meeting["door"], meeting["token"]) else FAR)
        mapped = MappedRows()
        with watchdog.phase("idle"):
            while _serve_one(worker, socket, watchdog, mapped):
                mapped.sweep()
    finally:
        context.destroy(linger=1000)


def _serve_one(worker: ColocatedWorker, socket: zmq.Socket[bytes], watchdog: Watchdog, mapped: MappedRows) -> bool:
    """Wait for a call and answer it; false: it was stop."""
    while (frames := receive_frames(socket)) is None:
        watchdog.check()
    header, tensors = decode(frames)
    if header.get("stop"):
        watchdog.expect_end()
        send_frames(socket, encode({"call": header["call"], "value": None, "has_tensors": False, "held": []}))
        return False
    role, method, place = header["role"], header["method"], header["place"]
    try:
        with watchdog.phase(f"{role}.{method}"):
            given = tensors if place is None else mapped.open(place)
            value, found = perform(
                worker, role, method, given if header["has_tensors"] else None, header["kwargs"], header["collect"]
            )
            found = mapped.without(found)
            del given  # what is held from here on is what the worker keeps
            told = {"call": header["call"], "value": value, "has_tensors": found is not None, "held": mapped.held()}
            answer = encode(told, found)
    except Exception as error:
        send_frames(socket, encode({"failure": watchdog.fail(error).to_json()}))
        raise
    send_frames(socket, answer)
    return True


def _wait_for_driver(watchdog: Watchdog, key: str, timeout_s: float) -> dict[str, Any]:
    """Where the driver listens. Looks again and again instead of blocking, so that a failure elsewhere is heard."""
    deadline = time.monotonic() + timeout_s
    while not watchdog.store.check([key]):
        watchdog.check()
        if time.monotonic() > deadline:
            raise RunFailed(f"the driver on rank 0 was not there after {timeout_s:g} s; see its log")
        time.sleep(0.02)
    meeting: dict[str, Any] = json.loads(watchdog.store.get(key))
    return meeting


def _phase(watchdog: Watchdog | None, name: str) -> contextlib.AbstractContextManager[None]:
    return watchdog.phase(name) if watchdog else contextlib.nullcontext()


def _identity(token: str, rank: int) -> bytes:
    return f"{token}/{rank}".encode()
