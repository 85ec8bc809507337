"""What does the trainer ask of a generation engine? `RolloutEngine`: token ids in, token ids out. No torch, no vllm at import."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from megappo.pp_weights.update import Receiver


@dataclass(frozen=True)
class SamplingParams:
    """How to sample; every parameter is explicit, so no default of an engine or a model folder ever applies.

    temperature 0 is greedy. stop_token_ids: generation ends after one of them, and it is part of the response.
    """

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Completion:
    """One response. log_probs: of each sampled token, temperature applied (natural log)."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    weight_version: int


class RolloutEngine(Receiver, Protocol):
    """A generation engine that holds exactly one version of the weights.

    As a `Receiver` it takes the next version: start, then for each bucket settle and load, then finish. From start on it refuses
    to generate, saying why, until an update has been finished. After a failure, or an update that was given up, start may be
    called again."""

    @property
    def weight_version(self) -> int | None:
        """The complete version that it holds; None where it holds none."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        """One completion a prompt, in the prompts' order; `seeds[i]` alone decides the samples of prompt i.

        Raises RunFailed where no complete version of the weights is held, saying why."""
        ...

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def fault(self) -> str | None:
        """What ended the engine's process, if it has one and that is gone. For a thread that watches while the engine is idle."""
        ...

    def close(self) -> None:
        """End the engine and everything it started. Safe to call twice."""
        ...


def request_seed(run_seed: int, step: int, prompt_id: int | str, sample: int) -> int:
    """Seed of one request, 63 bits: a hash of what the request is, so that samples depend on neither batch nor layout."""
    text = f"{run_seed}/{step}/{prompt_id}/{sample}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
