"""Which groups can teach anything, and how often is the batch refilled? DAPO's dynamic sampling (arXiv:2503.14476, equation 11).

A group whose responses all score alike has the advantage 0 everywhere: it is dropped, and more prompts are sampled until the
batch is full or the rounds are over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megappo.algorithms.outcome_advantages import group_moments


def rows_with_signal(scores: Tensor, group_ids: Tensor, response_mask: Tensor) -> Tensor:
    """(b,) bool: True on the samples of groups in which at least two responses count and their scores differ.

    scores, group_ids (b,), response_mask (b, r) as in `outcome_advantages`. A sample without valid tokens goes with its group.
    A score that is not a number differs from everything, so that it is seen where steps are skipped, not here.
    """
    std = group_moments(scores, group_ids, response_mask).std
    return (std > 0) | torch.isnan(std)


@dataclass(frozen=True)
class Refill:
    """The books of one batch: how many groups it wants, which of the sampled ones (0, 1, 2 ... in the order of sampling) it has.

    Start with `Refill(num_groups, max_rounds)`; after each round of sampling `after_round`; train when not `needs_more`.
    """

    wanted: int
    max_rounds: int
    kept: tuple[int, ...] = ()
    sampled: int = 0
    rounds: int = 0
    surplus: int = 0
    """groups with a signal that came after the batch was full; they are left out"""

    def __post_init__(self) -> None:
        if self.wanted < 1 or self.max_rounds < 1:
            raise ValueError(f"a batch wants at least one group and one round, got {self.wanted} and {self.max_rounds}")

    def after_round(self, has_signal: Sequence[bool]) -> Refill:
        """has_signal: of each group of this round."""
        if not self.needs_more:
            raise ValueError(
                f"the batch needs no further round: {len(self.kept)} of {self.wanted} groups after {self.rounds} rounds"
            )
        good = [self.sampled + i for i, signal in enumerate(has_signal) if signal]
        room = self.wanted - len(self.kept)
        return replace(
            self,
            kept=self.kept + tuple(good[:room]),
            sampled=self.sampled + len(has_signal),
            rounds=self.rounds + 1,
            surplus=self.surplus + len(good[room:]),
        )

    @property
    def missing(self) -> int:
        """Groups the batch still lacks: how many prompts the next round should sample, at least."""
        return self.wanted - len(self.kept)

    @property
    def needs_more(self) -> bool:
        """False once the batch is full or the rounds are over; then it is trained on as it is, short or even empty."""
        return self.missing > 0 and self.rounds < self.max_rounds

    @property
    def dropped(self) -> int:
        """Groups without a signal."""
        return self.sampled - len(self.kept) - self.surplus
