"""Did every tensor arrive, whole and under its name? Checksums of bytes and comparison of names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache

import numpy as np
import torch

from megappo.errors import RunFailed
from megappo.pp_weights.manifest import Manifest, dtype_name

_BLOCK_WORDS = 1 << 14  # 128 KiB of data and as much of factors: both stay in the cache
_WORD_MASK = (1 << 64) - 1
_SHOWN = 5  # names of a list that a message shows


class NamesDiffer(RunFailed):
    """Tensors do not agree with what was expected. The three lists are complete; the message shows the first of each."""

    def __init__(self, what: str, missing: list[str], unexpected: list[str], misshapen: list[str]) -> None:
        self.missing, self.unexpected, self.misshapen = missing, unexpected, misshapen
        lists = (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
        super().__init__(f"{what}: " + "; ".join(f"{label}: {_shorten(names)}" for label, names in lists))


def compare_names(
    expected: Mapping[str, tuple[int, ...]],
    got: Mapping[str, tuple[int, ...]],
    what: str = "weights",
    allow_missing: Collection[str] = (),
    allow_unexpected: Collection[str] = (),
) -> None:
    """Raise `NamesDiffer` unless `got` (name -> shape) is what is `expected`, but for the names that are allowed to differ."""
    missing = [name for name in expected if name not in got and name not in allow_missing]
    unexpected = [name for name in got if name not in expected and name not in allow_unexpected]
    misshapen = [
        f"{name} {tuple(got[name])}, expected {tuple(expected[name])}"
        for name in expected
        if name in got and tuple(got[name]) != tuple(expected[name])
    ]
    if missing or unexpected or misshapen:
        raise NamesDiffer(what, missing, unexpected, misshapen)


def checksum(tensor: torch.Tensor) -> int:
    """Sum of a tensor's 8-byte words, each times an odd factor of its position, modulo 2**64.

    Odd factors have inverses modulo 2**64, so a change inside one word always shows; swapped words, rows or blocks show because
    the factors differ. Not a cryptographic hash: it is made to run at memory speed.
    """
    data = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    num_words = data.size // 8
    words = data[: num_words * 8].view(np.uint64)
    factors = _factors()
    total = data.size
    for block, start in enumerate(range(0, num_words, _BLOCK_WORDS)):
        part = words[start : start + _BLOCK_WORDS]
        total += int(np.dot(part, factors[: part.size])) * _odd_hash(block)
    tail = data[num_words * 8 :]
    if tail.size:
        total += int.from_bytes(tail.tobytes(), "little") * _odd_hash(-1)
    return total & _WORD_MASK


def checksums(views: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: checksum(tensor) for name, tensor in views.items()}


def verify(manifest: Manifest, views: Mapping[str, torch.Tensor]) -> None:
    """Raise RunFailed unless `views` holds what the manifest names, with its shapes, dtypes and checksums."""
    compare_names(
        {entry.name: entry.held_shape for entry in manifest.entries},
        {name: tuple(view.shape) for name, view in views.items()},
        f"weights version {manifest.weight_version}",
    )
    unsummed = [entry.name for entry in manifest.entries if entry.checksum is None]
    if unsummed:
        raise RunFailed(
            f"weights version {manifest.weight_version}: published without checksums, cannot verify: {_shorten(unsummed)}"
        )
    damaged = [
        entry.name
        for entry in manifest.entries
        if dtype_name(views[entry.name].dtype) != entry.dtype or checksum(views[entry.name]) != entry.checksum
    ]
    if damaged:
        raise RunFailed(f"weights version {manifest.weight_version}: bytes differ from what was published: {_shorten(damaged)}")


@lru_cache(maxsize=1)
def _factors() -> np.ndarray:
    return np.array([_odd_hash(position + (1 << 32)) for position in range(_BLOCK_WORDS)], dtype=np.uint64)


def _odd_hash(number: int) -> int:
    """splitmix64 of a number, made odd."""
    z = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _WORD_MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD_MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD_MASK
    return (z ^ (z >> 31)) | 1


def _shorten(names: list[str]) -> str:
    if not names:
        return "none"
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
