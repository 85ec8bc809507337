"""How do several engines act as one? `EngineGroup` on the driver's rank calls the `EngineOnRank` of each rank that has one.

Prompts are spread in contiguous shares, so that the samples of one prompt stay together and share the engine's prefix cache. A
sample depends on its request alone, so it does not matter which engine, or how many, it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megappo.controller.dispatch import Dispatch, dispatched, split_rows
from megappo.errors import RunFailed
from megappo.rollout.engine import Completion, RolloutEngine, SamplingParams
from megappo.rollout.request import EngineLimits, check_request
from megappo.rollout.state import EngineState
from megappo.rollout.wire import pack_completions, pack_ragged, pack_seeds, unpack_completions, unpack_ragged, unpack_seeds

if TYPE_CHECKING:
    from megappo.controller.worker import WorkerGroup
    from megappo.pp_weights.update import Bucket, Receiver, Update

_REQUEST = ("prompts", "lengths", "seeds")
_REPLY = ("tokens", "lengths", "log_probs", "reasons")


class EngineGroup:
    """Engines on ranks behind the `RolloutEngine` Protocol. Each belongs to its rank, which ends it; `close` ends none.

    workers: the group that has the role `engine` on `num_engines` ranks. limits: of each engine.
    receiver: what brings an update to all of them (`pp_weights.delivery.Lead`).
    """

    def __init__(self, workers: WorkerGroup, num_engines: int, limits: EngineLimits, receiver: Receiver) -> None:
        self._workers, self._num_engines, self._limits, self._receiver = workers, num_engines, limits, receiver
        self._state = EngineState(f"the group of {num_engines} engines")

    @property
    def weight_version(self) -> int | None:
        """The complete version that all of them hold; None where they do not."""
        return self._state.weight_version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        version = self._state.require_generate()
        check_request(self._limits, prompts, sampling, seeds)
        shares = [
            _to_tensors(_REQUEST, (*pack_ragged(prompts[share]), pack_seeds(seeds[share])))
            for share in split_rows(len(prompts), self._num_engines)
        ]
        replies = self._workers.call("engine", "generate", shares, sampling=asdict(sampling), version=version)
        return [completion for tensors, _ in replies for completion in unpack_completions(_to_frames(_REPLY, tensors), version)]

    def start(self, update: Update) -> None:
        self._state.begin_update(update.version)
        with self._state.updating():
            self._receiver.start(update)

    def settle(self) -> None:
        with self._state.updating():
            self._receiver.settle()

    def load(self, bucket: Bucket) -> None:
        with self._state.updating():
            self._receiver.load(bucket)

    def finish(self) -> None:
        with self._state.updating():
            self._receiver.finish()
            self._state.commit()

    def sleep(self) -> None:
        self._state.sleep()
        self._workers.call("engine", "sleep")

    def wake(self) -> None:
        self._state.wake()
        self._workers.call("engine", "wake")

    def fault(self) -> str | None:
        """None: each rank watches its own engine."""
        return None

    def close(self) -> None:
        self._state.close()


class EngineOnRank:
    """The role `engine` on a rank that has one."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    @dispatched(Dispatch.ALL)
    def generate(self, tensors: dict[str, Tensor], sampling: dict[str, object], version: int) -> tuple[dict[str, Tensor], None]:
        """This rank's share of the prompts, with the weights `version` and no others."""
        held = self._engine.weight_version
        if held != version:
            raise RunFailed(
                f"the engine of this rank holds weights version {held}, not the version {version} that the others hold"
            )
        prompts, lengths, seeds = _to_frames(_REQUEST, tensors)
        params = SamplingParams(**{**sampling, "stop_token_ids": tuple(sampling["stop_token_ids"])})  # type: ignore[arg-type]
        rows = unpack_ragged(prompts, lengths)
        found = self._engine.generate(rows, params, unpack_seeds(seeds)) if rows else []
        frames = pack_completions(
            [list(completion.token_ids) for completion in found],
            [list(completion.log_probs) for completion in found],
            [completion.finish_reason for completion in found],
        )
        return _to_tensors(_REPLY, frames), None

    @dispatched(Dispatch.ALL)
    def sleep(self) -> None:
        """Give weights and cache up."""
        self._engine.sleep()

    @dispatched(Dispatch.ALL)
    def wake(self) -> None:
        """Take memory again; weights come with the next update."""
        self._engine.wake()


def _to_tensors(names: Sequence[str], frames: Sequence[bytes]) -> dict[str, Tensor]:
    """A message's frames as what travels between ranks."""
    return {
        name: torch.frombuffer(bytearray(frame), dtype=torch.uint8) if frame else torch.empty(0, dtype=torch.uint8)
        for name, frame in zip(names, frames, strict=True)
    }


def _to_frames(names: Sequence[str], tensors: dict[str, Tensor]) -> list[bytes]:
    return [tensors[name].numpy().tobytes() for name in names]
