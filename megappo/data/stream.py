"""Which prompts does a step get? `PromptStream`: an order that is a function of (seed, epoch) alone, from one source or a mix."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from megappo.data.prompts import PromptRow
from megappo.errors import UserError


def epoch_order(num_rows: int, seed: int, epoch: int, source: int = 0) -> list[int]:
    """Order of the rows in an epoch. From raw bits, whose stream numpy promises to keep (of `permutation` it does not).

    source: the number of the source in a mix, so that sources of one length are not shuffled alike."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch, source])).random_raw(num_rows)
    return [int(i) for i in np.argsort(bits, kind="stable")]


class PromptStream:
    """Batches of rows without end; each row once an epoch.

    Without weights all rows are one set. With weights each source (`row.source`, in order of appearance) has epochs of its own,
    and at any time it has given its share of the rows to within one row. Raises UserError where there is not a weight a source.
    """

    def __init__(
        self, rows: Sequence[PromptRow], seed: int, shuffle: bool = True, weights: Sequence[float] | None = None
    ) -> None:
        by_source: dict[str, list[PromptRow]] = {}
        for row in rows:
            by_source.setdefault(row.source if weights is not None else "", []).append(row)
        if weights is not None and len(weights) != len(by_source):
            raise UserError(f"data.weights has {len(weights)} values for {len(by_source)} sources; give one for each")
        self._epochs = [_Epochs(rows, seed, shuffle, i) for i, rows in enumerate(by_source.values())]
        exact = [Fraction(str(weight)) for weight in weights or [1] * len(self._epochs)]
        self._shares = [weight / sum(exact) for weight in exact]
        self._facts = {
            "run.seed": seed,
            "data.shuffle": shuffle,
            "data.weights": None if weights is None else list(weights),
            "the number of rows of data.train": [len(epochs.rows) for epochs in self._epochs],
            "the digest of the rows of data.train": _digest(rows),
        }

    def next_batch(self, num_rows: int) -> list[PromptRow]:
        """The next rows; where an epoch ends inside the batch the next epoch goes on in it. No row is skipped or left over."""
        return [self._epochs[self._next_source()].next_row() for _ in range(num_rows)]

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON-able data: (epoch, offset) of each source, and what the order depends on."""
        return {"places": [[epochs.epoch, epochs.offset] for epochs in self._epochs], "facts": self._facts}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state()` was taken. Raises UserError where the data, or what their order depends on, has changed since."""
        for name, saved in state["facts"].items():
            if self._facts[name] != saved:
                raise UserError(
                    f"the order of the prompts cannot go on: {name} is {self._facts[name]}, but the saved run had {saved}; "
                    "resume with the same"
                )
        for epochs, (epoch, offset) in zip(self._epochs, state["places"], strict=True):
            epochs.go_to(epoch, offset)

    def _next_source(self) -> int:
        """The source that gives the next row: of those that are behind their share, the one that must come soonest.

        Tijdeman's solution of the chairman assignment problem (Discrete Mathematics 32, 1980). It holds every source to its share
        within 1 - 1/(2k - 2) rows, which picking the source that is furthest behind does not do for five sources and more."""
        if len(self._epochs) == 1:
            return 0
        slack = Fraction(1, 2 * len(self._epochs) - 2)
        served = [epochs.num_served for epochs in self._epochs]
        behind = [share * (sum(served) + 1) - count for share, count in zip(self._shares, served, strict=True)]
        due = [i for i, lack in enumerate(behind) if lack >= slack]
        return min(due, key=lambda i: (1 - slack - behind[i]) / self._shares[i])


class _Epochs:
    """One set of rows, epoch after epoch."""

    def __init__(self, rows: Sequence[PromptRow], seed: int, shuffle: bool, source: int) -> None:
        self.rows = rows
        self._seed, self._shuffle, self._source = seed, shuffle, source
        self.go_to(0, 0)

    @property
    def num_served(self) -> int:
        return self.epoch * len(self.rows) + self.offset

    def go_to(self, epoch: int, offset: int) -> None:
        self.epoch, self.offset = epoch, offset
        num_rows = len(self.rows)
        self._order = epoch_order(num_rows, self._seed, epoch, self._source) if self._shuffle else list(range(num_rows))

    def next_row(self) -> PromptRow:
        if self.offset == len(self.rows):
            self.go_to(self.epoch + 1, 0)
        self.offset += 1
        return self.rows[self._order[self.offset - 1]]


def _digest(rows: Sequence[PromptRow]) -> str:
    """Hash of what a run gets to see of the rows: token ids and answers, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.asarray(row.prompt_ids, np.int64).tobytes())
        digest.update(f"\0{row.answer}\0".encode())
    return digest.hexdigest()[:16]
