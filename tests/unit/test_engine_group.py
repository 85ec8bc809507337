"""Do several engines answer as one would, with one version or not at all? `EngineGroup` over engines that only compute a hash."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megappo.controller.colocate import create_colocated_worker
from megappo.controller.wire import decode, encode, plain
from megappo.controller.worker import perform
from megappo.errors import RunFailed, UserError
from megappo.pp_weights.update import Bucket, Update
from megappo.rollout.engine import Completion, SamplingParams
from megappo.rollout.factory import engine_devices
from megappo.rollout.group import EngineGroup, EngineOnRank
from megappo.rollout.request import EngineLimits

SAMPLING = SamplingParams(temperature=0.7, top_p=1.0, top_k=-1, max_new_tokens=4, stop_token_ids=(2, 5))
LIMITS = EngineLimits(max_model_len=20, vocab_size=50)


class Engine:
    """A response depends on the request alone."""

    def __init__(self) -> None:
        self.weight_version: int | None = None
        self.asked: list[list[list[int]]] = []
        self.calls: list[str] = []

    def generate(self, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int]) -> list[Completion]:
        assert sampling == SAMPLING
        self.asked.append(prompts)
        return [self.answer(prompt, seed, self.weight_version) for prompt, seed in zip(prompts, seeds, strict=True)]

    @staticmethod
    def answer(prompt: Sequence[int], seed: int, version: int | None) -> Completion:
        length = 1 + (sum(prompt) + seed) % 4
        ids = tuple((seed + i * len(prompt)) % 50 for i in range(length))
        return Completion(
            ids, tuple(-1 / (3 + i + token) for i, token in enumerate(ids)), "stop" if length < 4 else "length", version or 0
        )

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")


class Workers:
    """A worker group whose only role is `engine`; what travels is encoded as between ranks."""

    world_size = 9

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.workers = [create_colocated_worker({"engine": EngineOnRank(engine)}) for engine in engines]  # type: ignore[arg-type]

    def call(self, role: str, method: str, /, tensors: Any = None, **kwargs: Any) -> list[Any]:
        given = tensors if tensors is not None else [None] * len(self.workers)
        assert len(given) == len(self.workers)
        answers = []
        for worker, own in zip(self.workers, given, strict=True):
            value, found = perform(worker, role, method, travelled(own), plain(kwargs), True)
            answers.append(value if found is None else (travelled(found), value))
        return answers

    def close(self) -> None: ...


def travelled(tensors: Mapping[str, Tensor] | None) -> dict[str, Tensor] | None:
    return None if tensors is None else decode([bytes(frame) for frame in encode({}, tensors)])[1]


class Receiver:
    """Brings every update to all engines, or fails in a step."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines, self.fails_in = engines, ""

    def start(self, update: Update) -> None:
        self._update = update
        self._step("start")

    def settle(self) -> None:
        self._step("settle")

    def load(self, bucket: Bucket) -> None:
        self._step("load")

    def finish(self) -> None:
        self._step("finish")
        for engine in self.engines:
            engine.weight_version = self._update.version

    def _step(self, step: str) -> None:
        if step == self.fails_in:
            raise RunFailed(f"no {step}")


def group_of(count: int, version: int | None = 3) -> tuple[EngineGroup, list[Engine], Receiver]:
    engines = [Engine() for _ in range(count)]
    receiver = Receiver(engines)
    group = EngineGroup(Workers(engines), count, LIMITS, receiver)
    if version is not None:
        publish(group, version)
    return group, engines, receiver


def publish(group: EngineGroup, version: int) -> None:
    group.start(Update(version, {}, "", 1))
    group.settle()
    group.load(Bucket(0, (), ()))
    group.finish()


@given(
    prompts=st.lists(st.lists(st.integers(0, 49), min_size=1, max_size=16), max_size=12),
    count=st.integers(1, 5),
    seed=st.integers(0, (1 << 63) - 1),
)
def test_any_number_of_engines_gives_the_answers_of_one_in_the_prompts_order(
    prompts: list[list[int]], count: int, seed: int
) -> None:
    seeds = [(seed + 7919 * i) % (1 << 63) for i in range(len(prompts))]
    group, engines, _ = group_of(count)
    found = group.generate(prompts, SAMPLING, seeds)
    assert found == [Engine.answer(prompt, s, 3) for prompt, s in zip(prompts, seeds, strict=True)]
    shares = [asked for engine in engines for asked in engine.asked]
    assert [prompt for share in shares for prompt in share] == prompts
    assert all(shares)  # an engine without a prompt is not asked
    assert max(map(len, shares), default=0) - min(map(len, shares), default=0) <= 1


def test_nothing_is_generated_before_the_first_version() -> None:
    group, engines, _ = group_of(2, version=None)
    with pytest.raises(RunFailed, match="the group of 2 engines cannot generate: no weights have been published"):
        group.generate([[1]], SAMPLING, [1])
    assert engines[0].asked == []


def test_an_engine_that_holds_another_version_is_not_asked() -> None:
    group, engines, _ = group_of(2)
    engines[1].weight_version = 2
    with pytest.raises(RunFailed, match="holds weights version 2, not the version 3 that the others hold"):
        group.generate([[1], [2]], SAMPLING, [1, 2])
    assert engines[1].asked == []


@pytest.mark.parametrize("step", ["start", "settle", "load", "finish"])
def test_after_an_update_that_failed_the_group_refuses_until_the_next(step: str) -> None:
    group, _, receiver = group_of(3)
    receiver.fails_in = step
    with pytest.raises(RunFailed, match=f"no {step}"):
        publish(group, 4)
    assert group.weight_version is None
    with pytest.raises(RunFailed, match=rf"the update to weights version 4 failed \(no {step}\); publish the weights again"):
        group.generate([[1]], SAMPLING, [1])
    receiver.fails_in = ""
    publish(group, 5)
    assert group.weight_version == 5
    assert [completion.weight_version for completion in group.generate([[1], [2]], SAMPLING, [1, 2])] == [5, 5]


def test_a_bad_prompt_is_named_by_its_number_in_the_whole_batch() -> None:
    group, engines, _ = group_of(2)
    with pytest.raises(UserError, match=r"prompt 3 holds a token id outside 0\.\.49"):
        group.generate([[1], [2], [3], [50]], SAMPLING, [1, 2, 3, 4])
    assert engines[0].asked == []


def test_all_engines_sleep_and_wake_and_then_need_weights() -> None:
    group, engines, _ = group_of(2)
    group.sleep()
    group.wake()
    assert [engine.calls for engine in engines] == [["sleep", "wake"]] * 2
    with pytest.raises(RunFailed, match="publish the weights again"):
        group.generate([[1]], SAMPLING, [1])
    group.close()
    with pytest.raises(RunFailed, match="closed"):
        publish(group, 4)


def test_the_gpus_of_an_engine_are_its_ranks_or_come_after_those_that_train() -> None:
    # one host, 4 ranks train: the engine of rank 2 shares its GPU and, with tp 2, the next one
    assert engine_devices(rank=2, local_rank=2, training_ranks=4, tp=2) == (2, 3)
    # two more ranks on it generate, with two GPUs each
    assert engine_devices(rank=4, local_rank=4, training_ranks=4, tp=2) == (4, 5)
    assert engine_devices(rank=5, local_rank=5, training_ranks=4, tp=2) == (6, 7)
    # a second host of 4 ranks: two train, two generate; a third: all generate
    assert engine_devices(rank=6, local_rank=2, training_ranks=6, tp=2) == (2, 3)
    assert engine_devices(rank=7, local_rank=3, training_ranks=6, tp=2) == (4, 5)
    assert engine_devices(rank=9, local_rank=1, training_ranks=6, tp=4) == (4, 5, 6, 7)


def test_a_rank_that_only_generates_imports_no_megatron() -> None:
    code = (
        "import sys, megappo.trainer.run, megappo.trainer.engine_rank, megappo.rollout.factory, megappo.parallel_state.device\n"
        "import megappo.rollout.vllm_engine, megappo.controller.rendezvous, megappo.controller.watchdog\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('megatron', 'vllm')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_an_engine_without_a_process_has_no_fault() -> None:
    group = EngineGroup(SimpleNamespace(), 2, LIMITS, Receiver([]))  # type: ignore[arg-type]
    assert group.fault() is None
