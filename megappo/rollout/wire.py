"""What do generate calls look like as frames? Flat arrays instead of lists of lists, in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np

from megappo.rollout.engine import Completion

FINISH_REASONS: tuple[Literal["stop", "length"], ...] = ("stop", "length")


def pack_ragged(rows: Sequence[Sequence[int]]) -> tuple[bytes, bytes]:
    """Rows of token ids as (all ids int32, row lengths int32)."""
    lengths = np.fromiter(map(len, rows), np.int32, len(rows))
    return np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())).tobytes(), lengths.tobytes()


def unpack_ragged(flat: bytes, lengths: bytes, dtype: type = np.int32) -> list[list[Any]]:
    values = np.frombuffer(flat, dtype).tolist()
    ends = np.cumsum(np.frombuffer(lengths, np.int32)).tolist()
    return [values[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def pack_seeds(seeds: Sequence[int]) -> bytes:
    return np.array(seeds, np.int64).tobytes()


def unpack_seeds(frame: bytes) -> list[int]:
    seeds: list[int] = np.frombuffer(frame, np.int64).tolist()
    return seeds


def pack_completions(tokens: list[list[int]], log_probs: list[list[float]], reasons: list[str]) -> tuple[bytes, ...]:
    """Frames of a reply; `unpack_completions` reads them. float64 keeps log-probs as the engine gave them."""
    flat, lengths = pack_ragged(tokens)
    probs = np.fromiter(chain.from_iterable(log_probs), np.float64).tobytes()
    return flat, lengths, probs, bytes(map(FINISH_REASONS.index, reasons))


def unpack_completions(frames: Sequence[bytes], weight_version: int) -> list[Completion]:
    flat, lengths, probs, reasons = frames
    rows = zip(unpack_ragged(flat, lengths), unpack_ragged(probs, lengths, np.float64), reasons, strict=True)
    return [Completion(tuple(ids), tuple(lps), FINISH_REASONS[reason], weight_version) for ids, lps, reason in rows]
