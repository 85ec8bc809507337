"""What is an engine asked, and which models and requests are refused before it sees them?"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megappo.config.schema import RolloutConfig
from megappo.data.prompts import PromptRow
from megappo.errors import UserError
from megappo.rollout.engine import Completion, SamplingParams, request_seed
from megappo.rollout.request import EngineLimits, check_request, read_limits
from megappo.rollout.vllm_engine import VllmEngine, child_environment
from megappo.trainer.rollout import generate, sampling_params

LIMITS = EngineLimits(max_model_len=10, vocab_size=20)
SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4, stop_token_ids=(2,))


def write_config(folder: Path, **changes: object) -> Path:
    config = {
        "vocab_size": 20, "max_position_embeddings": 32, "num_attention_heads": 4, "hidden_size": 128, "head_dim": 32, **changes
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_limits_come_from_the_folder(tmp_path: Path) -> None:
    assert read_limits(write_config(tmp_path), max_model_len=32) == EngineLimits(max_model_len=32, vocab_size=20)


def test_a_quantised_folder_is_refused(tmp_path: Path) -> None:
    folder = write_config(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match=r"is quantised \(config.json has quantization_config with quant_method='fp8'"):
        read_limits(folder, max_model_len=8)


def test_lengths_past_the_models_positions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"= 33 is more than the 32 positions"):
        read_limits(write_config(tmp_path), max_model_len=33)


def test_a_refused_model_starts_no_process(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "vllm.log"
    with pytest.raises(UserError, match=r"rollout.tp=3 does not divide num_attention_heads=4 .* \[1, 2, 4\]"):
        VllmEngine(write_config(tmp_path), log_path=log, max_model_len=16, tp=3)
    with pytest.raises(UserError, match=r"zero_copy=true is for a CPU, and the engine runs on a GPU; turn it off"):
        VllmEngine(write_config(tmp_path), log_path=log, max_model_len=16, device="cuda", zero_copy=True)
    with pytest.raises(UserError, match="head_dim=16"):
        VllmEngine(write_config(tmp_path, head_dim=16), log_path=log, max_model_len=16)
    assert not log.exists()


def test_prompts_that_fit_exactly_are_taken() -> None:
    check_request(LIMITS, [[1], [19] * 6], SAMPLING, [0, 2**63 - 1])


@pytest.mark.parametrize(
    "prompts, seeds, message",
    [
        ([[1, 2]], [], "1 prompts but 0 seeds"),
        ([[1], []], [0, 0], "prompt 1 has 0 tokens"),
        ([[1] * 7], [0], "prompt 0 has 7 tokens; with 4 new tokens the engine takes 1 to 6"),
        ([[20]], [0], r"outside 0\.\.19"),
        ([[-1]], [0], r"outside 0\.\.19"),
        ([[1]], [2**63], "seed 9223372036854775808 of prompt 0"),
        ([[1]], [-1], "seed -1"),
    ],
)
def test_a_bad_request_is_named(prompts: list[list[int]], seeds: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_request(LIMITS, prompts, SAMPLING, seeds)


@pytest.mark.parametrize(
    "change, key",
    [
        ({"temperature": 2.5}, "rollout.temperature=2.5"),
        ({"temperature": 0.001}, "rollout.temperature=0.001"),
        ({"temperature": -1.0}, "rollout.temperature=-1.0"),
        ({"top_p": 0.0}, "rollout.top_p=0.0"),
        ({"top_k": -2}, "rollout.top_k=-2"),
        ({"max_new_tokens": 0}, "rollout.max_new_tokens=0"),
    ],
)
def test_sampling_that_vllm_would_refuse_or_change_is_refused(change: dict[str, float], key: str) -> None:
    with pytest.raises(UserError, match=key):
        check_request(LIMITS, [[1]], replace(SAMPLING, **change), [0])


def test_the_childs_environment_knows_nothing_of_the_launcher() -> None:
    launcher = {
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "1",
        "GROUP_RANK": "0", "ROLE_RANK": "0", "TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "8", "LD_PRELOAD": "a", "HOME": "h",
    }  # fmt: skip
    env = child_environment(launcher, threads=2, device="cpu")
    kept = set(env) & set(launcher)
    assert kept == {"OMP_NUM_THREADS", "HOME"}
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


@pytest.mark.parametrize("visible, expected", [(None, "1,3"), ("GPU-a,GPU-b,GPU-c,GPU-d", "GPU-b,GPU-d")])
def test_an_engine_sees_its_own_gpus_of_those_that_the_trainer_sees(visible: str | None, expected: str) -> None:
    trainer = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    assert child_environment(trainer, threads=1, device="cuda", devices=(1, 3))["CUDA_VISIBLE_DEVICES"] == expected
    assert child_environment(trainer, threads=1, device="cuda").get("CUDA_VISIBLE_DEVICES") == visible


def test_each_request_has_a_seed_of_its_own() -> None:
    seeds = {request_seed(*request) for request in itertools.product((1, 2), (0, 1), range(8), range(4))}
    assert len(seeds) == 2 * 2 * 8 * 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_sampling_is_the_configs_and_greedy_decoding_leaves_nothing_to_a_default() -> None:
    tokenizer: Any = SimpleNamespace(eos_ids=(2, 5))
    rollout = RolloutConfig(temperature=0.6, top_p=0.9, top_k=20, max_new_tokens=7)
    assert sampling_params(rollout, tokenizer) == SamplingParams(0.6, 0.9, 20, 7, (2, 5))
    assert sampling_params(rollout, tokenizer, greedy=True) == SamplingParams(0.0, 1.0, -1, 7, (2, 5))
    assert sampling_params(RolloutConfig(max_new_tokens=7), tokenizer) == SamplingParams(1.0, 1.0, -1, 7, (2, 5))


def test_a_row_that_comes_several_times_in_a_step_gets_another_seed_each_time() -> None:
    seeds: list[int] = []

    def answer(prompts: Sequence[Sequence[int]], sampling: SamplingParams, own: Sequence[int]) -> list[Completion]:
        seeds.extend(own)
        return [Completion((3, 2), (-1.0, -1.0), "stop", 0) for _ in prompts]

    engine: Any = SimpleNamespace(generate=answer)
    tokenizer: Any = SimpleNamespace(decode=lambda ids: "")
    rows = [PromptRow(i, (4,), "p", "1", id=f"row {i}") for i in (0, 1, 0)]  # a batch may go on into the next epoch
    seen: Counter[int] = Counter()
    for some in (rows, rows[:1]):  # and a round of dynamic sampling may draw a row again
        generate(engine, some, SAMPLING, tokenizer, seed=7, step=3, n=2, seen=seen)
    assert len(seeds) == len(set(seeds)) == 8
    seeds_before = list(seeds)
    seeds.clear()
    generate(engine, rows, SAMPLING, tokenizer, seed=7, step=3, n=2)
    assert seeds == seeds_before[:6]  # the same run draws the same
    seeds.clear()
    generate(engine, rows, SAMPLING, tokenizer, seed=7, step=4, n=2)
    assert not set(seeds) & set(seeds_before)


def test_the_factory_imports_neither_torch_nor_vllm() -> None:
    code = "import sys, megappo.rollout.factory; print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
