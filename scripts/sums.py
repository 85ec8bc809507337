"""Which sums are trained on, and which are held out? `split_sums`, by unordered pair."""

from __future__ import annotations

import random
from collections.abc import Sequence


def split_sums(numbers: Sequence[int], num_validation: int, seed: int) -> dict[str, list[tuple[int, int]]]:
    """{"validation": num_validation pairs (a, b), "train": all others}, shuffled. 7 + 35 and 35 + 7 fall on the same side."""
    rng = random.Random(seed)
    pairs = [(a, b) for i, a in enumerate(numbers) for b in numbers[i:]]
    rng.shuffle(pairs)
    split: dict[str, list[tuple[int, int]]] = {"validation": [], "train": []}
    for a, b in pairs:
        both = [(a, b)] if a == b else [(a, b), (b, a)]
        fits = len(split["validation"]) + len(both) <= num_validation
        split["validation" if fits else "train"] += both
    for sums in split.values():
        rng.shuffle(sums)
    return split
