"""Do the engines keep the promises of `RolloutEngine`? hf, vLLM, vLLM cut over two workers, and vLLM that reads the weights in
place; against transformers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.config.schema import Config, RolloutConfig, WeightsConfig
from megappo.config.schema_models import ModelConfig
from megappo.errors import RunFailed, UserError
from megappo.pp_weights.assemble import deliver
from megappo.pp_weights.buffer import WeightBuffer, weight_buffer_meta
from megappo.pp_weights.manifest import build_manifest, fingerprint_of
from megappo.pp_weights.update import Bucket, Update
from megappo.pp_weights.verify import checksums
from megappo.rollout.engine import Completion, SamplingParams
from megappo.rollout.factory import make_engine
from megappo.rollout.hf_engine import HfEngine
from megappo.rollout.vllm_engine import VllmEngine, group_members
from tests.buckets import GARBAGE, in_models_order, send, worker_shard
from tests.models import make_llama_folder

Engine = HfEngine | VllmEngine

GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=8, stop_token_ids=())
SAMPLED = SamplingParams(temperature=0.7, top_p=1.0, top_k=-1, max_new_tokens=8, stop_token_ids=())


def random_prompts(lengths: list[int], seed: int = 5) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 61, (length,), generator=generator).tolist() for length in lengths]


# Several KV blocks long (vLLM's are 16 to 128 tokens), so that a prefix cache has something to hold.
LONG_PROMPTS = random_prompts([150, 150, 137, 40, 3, 1])


class Trainer:
    """A transformers model in the trainer's place: `publish` hands its weights over, the rest recomputes what an engine says."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
        self.version = 0
        self.buffers: list[WeightBuffer] = []

    def change_weights(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_parameters())

    def buffer(self, tensors: dict[str, torch.Tensor] | None = None) -> WeightBuffer:
        """The weights as they are, or others, checksummed, under the next version; q, k, v and gate, up side by side."""
        self.version += 1
        tensors = self.tensors if tensors is None else tensors
        buffer = WeightBuffer.create(build_manifest(weight_buffer_meta(tensors), order=in_models_order(tensors)))
        for name, view in buffer.views().items():
            view.copy_(tensors[name])
        buffer.manifest = buffer.manifest.stamped(self.version, checksums(buffer.views()))
        return buffer

    def publish(self, engine: Engine) -> None:
        """The whole model in one buffer. It stays until the version after it is in force, as an engine without a copy of its own
        needs it, and is garbage from then on."""
        self.buffers.append(self.buffer())
        deliver(engine, self.buffers[-1], verify=True)
        for old in self.buffers[:-1]:
            old.data.fill_(GARBAGE)
            old.close()
        self.buffers = self.buffers[-1:]

    def send(self, engine: Engine, bucket_bytes: int = 20000, **options: Any) -> int:
        """In buckets; see `buckets.send`."""
        self.version += 1
        return send(engine, self.tensors, self.version, bucket_bytes=bucket_bytes, **options)

    def log_probs(self, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
        """(r, V) after temperature."""
        logits = self.model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        return (logits / temperature).log_softmax(-1)

    def check_greedy(self, prompts: list[list[int]], completions: list[Completion]) -> None:
        for prompt, completion in zip(prompts, completions, strict=True):
            log_p = self.log_probs(prompt, list(completion.token_ids), 1.0)
            assert completion.token_ids == tuple(log_p.argmax(-1).tolist())

    def check_log_probs(self, prompts: list[list[int]], completions: list[Completion], temperature: float) -> None:
        for prompt, completion in zip(prompts, completions, strict=True):
            log_p = self.log_probs(prompt, list(completion.token_ids), temperature)
            expected = log_p.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)


def make_folder(folder: Path, tied: bool) -> Path:
    """A model whose own sampling defaults would change every sample."""
    make_llama_folder(folder, tied=tied)
    defaults = {
        "do_sample": True,
        "top_k": 2,
        "top_p": 0.5,
        "temperature": 0.3,
        "repetition_penalty": 1.8,
        "eos_token_id": list(range(30)),
    }
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    return folder


def build(kind: str, folder: Path, tmp_path: Path) -> Engine:
    rollout = RolloutConfig(
        engine="hf" if kind == "hf" else "vllm",
        tp=2 if kind == "vllm-tp2" else 1,
        max_prompt_tokens=160,
        max_new_tokens=32,
        max_num_seqs=32,
        kv_cache_bytes=32 << 20,
    )
    weights = WeightsConfig(zero_copy=kind == "vllm-zero-copy")
    config = Config(model=ModelConfig(path=str(folder)), rollout=rollout, pp_weights=weights)
    engine = make_engine(config, folder, log_path=tmp_path / "logs" / "vllm.log")
    assert isinstance(engine, HfEngine | VllmEngine)
    return engine


@pytest.fixture(
    scope="module",
    params=[
        "hf",
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow]),
        pytest.param("vllm-tp2", marks=[pytest.mark.vllm, pytest.mark.slow]),
        pytest.param("vllm-zero-copy", marks=[pytest.mark.vllm, pytest.mark.slow, pytest.mark.long]),
    ],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Trainer]]:
    """An engine and the trainer it gets its weights from. Tied for vllm-tp2 and vllm-zero-copy, else untied."""
    tmp_path = tmp_path_factory.mktemp(request.param)
    folder = make_folder(tmp_path / "model", tied=request.param in ("vllm-tp2", "vllm-zero-copy"))
    start = time.monotonic()
    engine = build(request.param, folder, tmp_path)
    if request.param != "hf":
        assert time.monotonic() - start < 1.0  # the trainer loads its model meanwhile
    trainer = Trainer(folder)
    yield engine, trainer
    assert isinstance(engine, HfEngine) or len(processes_of(engine)) >= 1
    if request.param == "vllm":
        check_kill_in_mid_update(engine, trainer)
    engine.close()
    engine.close()
    assert processes_of(engine) == []
    with pytest.raises(RunFailed, match=r"cannot generate: (it is closed|.*was killed by SIGKILL)"):
        engine.generate([[1]], GREEDY, [0])


def check_kill_in_mid_update(engine: Engine, trainer: Trainer) -> None:
    assert isinstance(engine, VllmEngine)
    buffer = trainer.buffer()
    manifest = buffer.manifest
    engine.start(Update(trainer.version, manifest.table, manifest.fingerprint, 1))
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"was killed by SIGKILL in (load|finish_update)"):
        load_and_finish(engine, Bucket(0, (buffer.path,), (manifest,)))
    assert engine.weight_version is None
    buffer.close()


def load_and_finish(engine: Engine, bucket: Bucket) -> None:
    engine.load(bucket)
    engine.finish()


def test_no_sample_comes_from_dummy_weights(pair: tuple[Engine, Trainer]) -> None:
    engine, trainer = pair
    with pytest.raises(RunFailed, match="no weights have been published"):
        engine.generate([[1]], GREEDY, [0])
    trainer.publish(engine)
    assert engine.generate([[1]], GREEDY, [0])[0].weight_version == trainer.version


def test_greedy_tokens_equal_transformers_after_each_update(pair: tuple[Engine, Trainer]) -> None:
    """The same long prompts at each version: keys and values of the old weights must not be met again."""
    engine, trainer = pair
    seen = []
    for version in range(3):
        trainer.change_weights(seed=version)
        trainer.publish(engine)
        completions = engine.generate(LONG_PROMPTS, GREEDY, [0] * len(LONG_PROMPTS))
        trainer.check_greedy(LONG_PROMPTS, completions)
        trainer.check_log_probs(LONG_PROMPTS, completions, temperature=1.0)
        assert {c.weight_version for c in completions} == {trainer.version}
        seen.append([c.token_ids for c in completions])
    assert seen[0] != seen[1] != seen[2]


def test_log_probs_are_those_at_the_sampling_temperature(pair: tuple[Engine, Trainer]) -> None:
    engine, trainer = pair
    trainer.publish(engine)
    completions = engine.generate(LONG_PROMPTS, SAMPLED, list(range(len(LONG_PROMPTS))))
    trainer.check_log_probs(LONG_PROMPTS, completions, temperature=0.7)


def test_a_seed_alone_decides_the_samples_of_its_prompt(pair: tuple[Engine, Trainer]) -> None:
    engine, trainer = pair
    trainer.publish(engine)
    prompts = [[7, 8, 9]] * 4 + LONG_PROMPTS[:2]
    seeds = [11, 12, 2**62 + 3, 11, 5, 6]
    torch.manual_seed(1)
    first = engine.generate(prompts, SAMPLED, seeds)
    torch.manual_seed(2)
    backwards = engine.generate(prompts[::-1], SAMPLED, seeds[::-1])[::-1]
    alone = [engine.generate([prompt], SAMPLED, [seed])[0] for prompt, seed in zip(prompts, seeds, strict=True)]
    tokens = [[c.token_ids for c in run] for run in (first, backwards, alone)]
    assert tokens[0] == tokens[1] == tokens[2]
    assert tokens[0][0] == tokens[0][3]
    assert len({tokens[0][0], tokens[0][1], tokens[0][2]}) == 3


def test_the_model_folders_sampling_defaults_never_apply(pair: tuple[Engine, Trainer]) -> None:
    """512 first tokens at temperature 1 follow the model's own distribution; with top_k=2 there would be two kinds."""
    engine, trainer = pair
    trainer.publish(engine)
    one = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=1, stop_token_ids=())
    tokens = [c.token_ids[0] for c in engine.generate([[4, 5, 6]] * 512, one, list(range(512)))]
    expected = trainer.log_probs([4, 5, 6], [0], 1.0)[0].exp()
    counts = torch.bincount(torch.tensor(tokens), minlength=61) / 512
    assert (counts - expected).abs().max() < 0.1
    assert len(set(tokens)) > 2
    # nor do its 30 end-of-sequence ids end anything
    longer = engine.generate([[4, 5, 6]] * 16, SAMPLED, list(range(16)))
    assert {len(c.token_ids) for c in longer} == {8}
    assert any(min(c.token_ids[:-1]) < 30 for c in longer)


def test_top_k_and_top_p_bound_the_samples_and_enter_the_log_probs(pair: tuple[Engine, Trainer]) -> None:
    engine, trainer = pair
    trainer.publish(engine)
    top2 = engine.generate([[4, 5, 6]] * 64, replace(SAMPLED, top_k=2, max_new_tokens=1), list(range(64)))
    log_p = trainer.log_probs([4, 5, 6], [0], 0.7)[0]
    best = log_p.topk(2)
    assert {c.token_ids[0] for c in top2} <= set(best.indices.tolist())
    renormalised = dict(zip(best.indices.tolist(), best.values.log_softmax(-1).tolist(), strict=True))
    for completion in top2:
        assert completion.log_probs[0] == pytest.approx(renormalised[completion.token_ids[0]], abs=1e-4)
    nucleus = engine.generate([[4, 5, 6]] * 8, replace(SAMPLED, top_p=1e-6, max_new_tokens=1), list(range(8)))
    assert {c.token_ids[0] for c in nucleus} == {int(log_p.argmax())}
    assert all(c.log_probs[0] == pytest.approx(0.0, abs=1e-6) for c in nucleus)


def test_a_stop_token_ends_the_response_and_is_part_of_it(pair: tuple[Engine, Trainer]) -> None:
    engine, trainer = pair
    trainer.publish(engine)
    prompts = LONG_PROMPTS[:4]
    free = engine.generate(prompts, GREEDY, [0] * 4)
    assert [c.finish_reason for c in free] == ["length"] * 4
    stop = free[0].token_ids[2]
    stopped = engine.generate(prompts, replace(GREEDY, stop_token_ids=(60, stop)), [0] * 4)
    for before, after in zip(free, stopped, strict=True):
        ends = [i + 1 for i, token in enumerate(before.token_ids) if token in (60, stop)]
        assert after.token_ids == before.token_ids[: ends[0] if ends else 8]
        assert after.finish_reason == ("stop" if ends else "length")
        assert len(after.log_probs) == len(after.token_ids)
    assert stopped[0].finish_reason == "stop"


def test_buckets_may_be_overwritten_once_they_are_read(pair: tuple[Engine, Trainer]) -> None:
    engine, trainer = pair
    trainer.change_weights(seed=30)
    if reads_in_place(engine):
        with pytest.raises(RunFailed, match="zero_copy=true takes whole tensors in one bucket"):
            trainer.send(engine)
        return
    assert trainer.send(engine, bucket_bytes=5000) > 100  # the larger tensors come in parts
    trainer.check_greedy(LONG_PROMPTS, engine.generate(LONG_PROMPTS, GREEDY, [0] * len(LONG_PROMPTS)))


def test_workers_take_their_shards_as_they_are(pair: tuple[Engine, Trainer], request: pytest.FixtureRequest) -> None:
    engine, trainer = pair
    trainer.change_weights(seed=31)
    shards = [worker_shard(trainer.tensors, worker, 2) for worker in range(2)]
    if "vllm-tp2" not in request.node.name:
        with pytest.raises(RunFailed, match="2 shards"):
            trainer.send(engine, shards=shards)
        return
    trainer.send(engine, shards=shards)
    trainer.check_greedy(LONG_PROMPTS, engine.generate(LONG_PROMPTS, GREEDY, [0] * len(LONG_PROMPTS)))
    with pytest.raises(
        RunFailed, match=r"misshapen: .*this worker's shard is"
    ):  # rows of the wrong count, not cut down in silence
        trainer.send(engine, shards=[trainer.tensors, trainer.tensors])
    trainer.change_weights(seed=32)
    trainer.publish(engine)  # whole tensors after shards
    trainer.check_greedy(LONG_PROMPTS, engine.generate(LONG_PROMPTS, GREEDY, [0] * len(LONG_PROMPTS)))


def test_an_engine_without_a_copy_reads_the_buffer_itself(pair: tuple[Engine, Trainer]) -> None:
    """What is written into the buffer in force shows at once in that engine, and in no other."""
    engine, trainer = pair
    trainer.publish(engine)
    prompts = random_prompts([40, 41, 42], seed=9)
    before = engine.generate(prompts, GREEDY, [0] * 3)
    trainer.check_greedy(prompts, before)
    trainer.change_weights(seed=33)
    for name, view in trainer.buffers[0].views().items():
        view.copy_(trainer.tensors[name])
    others = random_prompts([40, 41, 42], seed=10)  # nothing of them is in the prefix cache
    after = engine.generate(others, GREEDY, [0] * 3)
    if reads_in_place(engine):
        trainer.check_greedy(others, after)
    else:
        with pytest.raises(AssertionError):
            trainer.check_greedy(others, after)


@pytest.mark.parametrize(
    "fault, message",
    [
        ("dropped", r"missing: model.layers.1.mlp.up_proj.weight; unexpected: none; misshapen: none"),
        ("renamed", r"missing: model.norm.weight; unexpected: norm.weight"),
        ("misshapen", r"misshapen: model.layers.2.self_attn.q_proj.weight \(64, 128\), expected \(128, 64\)"),
        ("quantised", r"misshapen: model.norm.weight int8, expected one of float32"),
        ("flipped byte", r"bytes differ from what was published: model.embed_tokens.weight"),
    ],
)
def test_a_failed_update_refuses_to_generate_until_a_complete_one(pair: tuple[Engine, Trainer], fault: str, message: str) -> None:
    engine, trainer = pair
    trainer.publish(engine)
    trainer.change_weights(seed=20)
    tensors = trainer.tensors
    if fault == "dropped":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    if fault == "renamed":
        tensors["norm.weight"] = tensors.pop("model.norm.weight")
    if fault == "misshapen":
        tensors["model.layers.2.self_attn.q_proj.weight"] = tensors["model.layers.2.self_attn.q_proj.weight"].reshape(64, 128)
    if fault == "quantised":
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    broken = trainer.buffer(tensors)
    if fault == "flipped byte":
        broken.views()["model.embed_tokens.weight"].view(torch.uint8)[0, 0] ^= 1
    with pytest.raises(RunFailed, match=message):
        deliver(engine, broken, verify=True)
    broken.close()
    check_refuses_then_repair(engine, trainer, message)


def check_refuses_then_repair(engine: Engine, trainer: Trainer, message: str) -> None:
    with pytest.raises(RunFailed, match=rf"the update to weights version {trainer.version} failed \(.*{message}"):
        engine.generate([[1]], GREEDY, [0])
    trainer.publish(engine)
    trainer.check_greedy(LONG_PROMPTS[:2], engine.generate(LONG_PROMPTS[:2], GREEDY, [0, 0]))


FAULTY_BUCKETS: dict[str, tuple[str, dict[str, Any]]] = {
    "last bucket missing": ("missing: .*model.norm.weight", {"edit": lambda buckets: buckets[:-1]}),
    "parts out of order": ("came, expected row 0", {"bucket_bytes": 5000, "edit": lambda b: [b[1], b[0], *b[2:]]}),
    "a bucket twice": ("came twice", {"edit": lambda buckets: [*buckets, buckets[-1]]}),
    "another version": ("a bucket of version 999 came", {"stamp": 999}),
    "another fingerprint": ("do not have the fingerprint 'x'", {"announce": lambda update: replace(update, fingerprint="x")}),
    "a tensor less announced": ("missing: model.norm.weight", {"announce": lambda update: without_norm(update)}),
}


def without_norm(update: Update) -> Update:
    table = {name: value for name, value in update.table.items() if name != "model.norm.weight"}
    return replace(update, table=table, fingerprint=fingerprint_of(table))


@pytest.mark.parametrize("fault", FAULTY_BUCKETS)
def test_buckets_that_are_not_what_was_announced_are_refused(pair: tuple[Engine, Trainer], fault: str) -> None:
    engine, trainer = pair
    if reads_in_place(engine):
        pytest.skip("takes one bucket")
    message, options = FAULTY_BUCKETS[fault]
    with pytest.raises(RunFailed, match=message):
        trainer.send(engine, **options)
    check_refuses_then_repair(engine, trainer, message)


def test_an_update_that_the_trainer_gives_up_makes_way_for_the_next(pair: tuple[Engine, Trainer]) -> None:
    engine, trainer = pair
    buffer = trainer.buffer()
    manifest = buffer.manifest
    engine.start(Update(trainer.version, manifest.table, manifest.fingerprint, 1))
    engine.load(Bucket(0, (buffer.path,), (manifest,)))
    with pytest.raises(RunFailed, match="did not complete; publish the weights again"):
        engine.generate([[1]], GREEDY, [0])
    trainer.change_weights(seed=34)
    trainer.publish(engine)
    buffer.close()
    trainer.check_greedy(LONG_PROMPTS[:2], engine.generate(LONG_PROMPTS[:2], GREEDY, [0, 0]))


def test_after_sleep_the_weights_must_be_published_again(pair: tuple[Engine, Trainer]) -> None:
    engine, trainer = pair
    trainer.publish(engine)
    engine.sleep()
    with pytest.raises(RunFailed, match="it is asleep"):
        engine.generate([[1]], GREEDY, [0])
    engine.wake()
    with pytest.raises(RunFailed, match="it slept and gave its weights up"):
        engine.generate([[1]], GREEDY, [0])
    trainer.publish(engine)
    trainer.check_greedy([[1]], engine.generate([[1]], GREEDY, [0]))


def test_a_prompt_that_does_not_fit_is_refused_and_the_engine_lives_on(pair: tuple[Engine, Trainer]) -> None:
    engine, trainer = pair
    trainer.publish(engine)
    with pytest.raises(UserError, match="prompt 1 has 185 tokens; with 8 new tokens the engine takes 1 to 184"):
        engine.generate([[1], [1] * 185], GREEDY, [0, 0])
    fits = [[1] * 184]
    trainer.check_greedy(fits, engine.generate(fits, GREEDY, [0]))
    assert engine.generate([], GREEDY, []) == []


def test_nothing_of_a_running_engine_has_a_name_in_shared_memory(pair: tuple[Engine, Trainer]) -> None:
    engine, _ = pair
    if isinstance(engine, HfEngine):
        pytest.skip("hf runs in this process")
    engine.wait_ready()
    members = group_members(engine.pid)
    mapped = {line.split("/dev/shm/")[1] for pid in members for line in read_maps(pid) if "/dev/shm/" in line}
    assert [name for name in mapped if not name.endswith("(deleted)")] == []


def reads_in_place(engine: Engine) -> bool:
    return isinstance(engine, VllmEngine) and engine.zero_copy


def processes_of(engine: Engine) -> list[int]:
    return group_members(engine.pid) if isinstance(engine, VllmEngine) else []


def read_maps(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.faults
def test_a_killed_engine_is_an_error_with_its_signal_and_its_last_words(tmp_path: Path) -> None:
    engine = build("vllm", make_folder(tmp_path / "model", tied=False), tmp_path)
    assert isinstance(engine, VllmEngine)
    deadline = time.monotonic() + 60
    while not engine.log_path.stat().st_size and time.monotonic() < deadline:
        time.sleep(0.1)  # it has begun to import
    with engine.log_path.open("a") as log:
        log.write("last words\n\n")
    os.kill(engine.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(RunFailed, match=r"was killed by SIGKILL in start; its log .*vllm.log ends: last words"):
        engine.wait_ready()
    with pytest.raises(RunFailed, match="was killed by SIGKILL in start"):
        engine.generate([[1]], GREEDY, [0])
    assert time.monotonic() - start < 5


@pytest.mark.vllm
@pytest.mark.slow
def test_a_model_that_vllm_refuses_is_an_error_that_names_the_log(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", tied=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    engine = build("vllm", folder, tmp_path)
    with pytest.raises(RunFailed, match=r"vLLM, start: .*NoSuchModel.* \(log: .*vllm.log\)"):
        engine.wait_ready()


TRAINER = """
import sys, time
from pathlib import Path
from tests.e2e.test_engine_vllm import Trainer, build, LONG_PROMPTS, SAMPLED
from dataclasses import replace
folder, tmp = Path(sys.argv[1]), Path(sys.argv[2])
engine = build("vllm-tp2", folder, tmp)
Trainer(folder).publish(engine)
print(engine.pid, flush=True)
while True:
    engine.generate(LONG_PROMPTS, replace(SAMPLED, max_new_tokens=32), range(len(LONG_PROMPTS)))
"""


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.faults
@pytest.mark.parametrize("victim", ["trainer", "worker"])
def test_whoever_dies_in_mid_generation_nothing_keeps_running(tmp_path: Path, victim: str) -> None:
    folder = make_folder(tmp_path / "model", tied=False)
    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-c", TRAINER, str(folder), str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        child = int(line)
        members = group_members(child)
        assert len(members) >= 3  # the child and two workers
        time.sleep(0.5)
        workers = [pid for pid in members if "VLLM::Worker" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(process.pid if victim == "trainer" else workers[1], signal.SIGKILL)
        _, stderr = process.communicate(timeout=30)
        assert wait_until(lambda: not group_members(child), seconds=10)
    finally:
        process.kill()
    if victim == "worker":
        assert process.returncode == 1
        assert "RunFailed" in stderr.strip().splitlines()[-1]


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
