"""What travels when a version of the weights does? An `Update` that announces it, then `Bucket`s, to a `Receiver`. No torch.

In mode `full` there is one bucket, which holds the model. In mode `bucketed` the model comes in several; a tensor that is larger
than a bucket comes in parts, whole rows each, in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megappo.pp_weights.manifest import Manifest

Table = Mapping[str, tuple[str, tuple[int, ...]]]
"""HF name -> (dtype without `torch.`, full shape) of every tensor of the model."""


@dataclass(frozen=True)
class Update:
    """One version on its way. table: every tensor that will come. shards: 1 where tensors come whole; t where each of the
    engine's t tensor-parallel workers gets its own shard (`gather: pp`), and `table` still says the full shapes.
    verify: every bucket's manifest carries checksums, and the receiver must compare them."""

    version: int
    table: Table
    fingerprint: str
    num_buckets: int
    shards: int = 1
    verify: bool = False

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (_, shape) in self.table.items()}


def pack_update(update: Update) -> dict[str, Any]:
    """What JSON can carry; `unpack_update` reads it."""
    return {
        "version": update.version,
        "table": {name: [dtype, list(shape)] for name, (dtype, shape) in update.table.items()},
        "fingerprint": update.fingerprint,
        "num_buckets": update.num_buckets,
        "shards": update.shards,
        "verify": update.verify,
    }


def unpack_update(fields: Mapping[str, Any]) -> Update:
    return Update(**{**fields, "table": {name: (dtype, tuple(shape)) for name, (dtype, shape) in fields["table"].items()}})


@dataclass(frozen=True)
class Bucket:
    """One filled piece of memory. paths[w]: memory that worker w reads (`WeightBuffer.open`), manifests[w]: what lies in it. One
    of each where tensors come whole."""

    index: int
    paths: tuple[str, ...]
    manifests: tuple[Manifest, ...]

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for manifest in self.manifests for entry in manifest.entries)


class Receiver(Protocol):
    """What takes a version on a rank: an engine, a group of engines, a writer of files.

    Calls come in the order start, then for each bucket settle and load, then finish. `settle` returns once nothing reads the
    buckets before any more: their memory may be written again from then on. A method that raises ends the update: no other
    follows, and an engine then refuses to generate until a complete update succeeds."""

    def start(self, update: Update) -> None: ...

    def settle(self) -> None: ...

    def load(self, bucket: Bucket) -> None:
        """Begin to read the bucket; may return before it is read."""
        ...

    def finish(self) -> None:
        """Wait for the last bucket, check that every announced tensor came once and whole, and put the version in force."""
        ...


class Guarded:
    """A receiver whose first failure is kept in `error`, and which is left alone from then on until the next start. So whoever
    must go on with others can, and raise it in the end. No receiver: nothing is done. seconds: that it took since the start."""

    def __init__(self, receiver: Receiver | None) -> None:
        self._receiver = receiver
        self.error: Exception | None = None
        self.seconds = 0.0

    def start(self, update: Update) -> None:
        self.error, self.seconds = None, 0.0
        self._do(lambda receiver: receiver.start(update))

    def settle(self) -> None:
        self._do(lambda receiver: receiver.settle())

    def load(self, bucket: Bucket) -> None:
        self._do(lambda receiver: receiver.load(bucket))

    def finish(self) -> None:
        self._do(lambda receiver: receiver.finish())

    def _do(self, step: Callable[[Receiver], None]) -> None:
        if self._receiver is None or self.error is not None:
            return
        began = time.perf_counter()
        try:
            step(self._receiver)
        except Exception as error:  # noqa: BLE001 - for the owner to raise
            self.error = error
        self.seconds += time.perf_counter() - began


class Receivers:
    """Several receivers as one: each step is done by all of them, in order. One that fails does not keep the others from going
    on (other ranks may be in step with them), but none finishes then, and `finish` raises the failure."""

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        self._receivers = [Guarded(receiver) for receiver in receivers]

    def start(self, update: Update) -> None:
        for receiver in self._receivers:
            receiver.start(update)

    def settle(self) -> None:
        for receiver in self._receivers:
            receiver.settle()

    def load(self, bucket: Bucket) -> None:
        for receiver in self._receivers:
            receiver.load(bucket)

    def finish(self) -> None:
        self._raise_first()
        for receiver in self._receivers:
            receiver.finish()
            self._raise_first()

    def _raise_first(self) -> None:
        for receiver in self._receivers:
            if receiver.error is not None:
                raise receiver.error
