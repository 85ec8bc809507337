"""Does one whole run keep its promises? pp2 x vpp2, critic, reference, real vLLM, 3 steps, each validated and saved."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megappo.checkpoint.source import hf_tensors
from megappo.config.load import load_config
from megappo.config.resolve import resolve
from megappo.data.tokenizer import load_tokenizer
from megappo.observe.metrics import METRICS
from megappo.rollout.vllm_engine import child_environment
from tests.e2e.command import ROOT, WITH_OPTIONS, Ended, Scene
from tests.e2e.reference import check_greedy, check_log_probs

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.distributed]

EOS, TOKENIZER_SIZE = 2, 16
FIELDS = {"sample_id", "prompt_ids", "response_ids", "logprobs", "weight_version", "finish_reason", "reward"}
FIELDS |= {"reward_parts", "skipped", "learnt"}
ROW_FIELDS = {"row_id", "id", "source", "position"}
TEXTS = {"prompt", "response", "answer", "temperature"}


def weights_of_version(scene: Scene, run: Ended, version: int) -> Path:
    """The path of a version: the model that the run started from, then what it saved."""
    return run.run_dir / "checkpoints" / f"step_{version:06d}" / "actor" if version else scene.folder / "model"


def test_the_last_lines_are_the_summary_of_what_was_measured(main_run: Ended) -> None:
    rewards = main_run.column("reward/mean")
    held_out = [sum(row["reward"] for row in main_run.greedy(step)) / 12 for step in (0, 3)]
    assert main_run.stdout.splitlines()[-2:] == [
        f"mean reward: {rewards[0]:.2f} -> {rewards[2]:.2f}",
        f"held-out accuracy: {held_out[0]:.2f} -> {held_out[1]:.2f}",
    ]
    assert main_run.column("validation/accuracy")[2] == pytest.approx(held_out[1])


def test_validation_also_samples_each_row(main_run: Ended) -> None:
    for step in (0, 1, 2, 3):
        rows = main_run.rollouts(step, "validation")
        sampled = [row for row in rows if row["temperature"] == 1.0]
        assert [row["row_id"] for row in main_run.greedy(step)] == list(range(12))
        assert [row["row_id"] for row in sampled] == [i for i in range(12) for _ in range(2)]
        assert [row["sample_id"] for row in rows] == list(range(36))
        if step:
            rewards = [row["reward"] for row in sampled]
            assert main_run.metrics[step - 1]["validation/avg_at_k"] == pytest.approx(sum(rewards) / 24)
            passed = [max(rewards[i : i + 2]) >= 0.5 for i in range(0, 24, 2)]
            assert main_run.metrics[step - 1]["validation/pass_at_k"] == pytest.approx(sum(passed) / 12)


def test_one_line_a_step_where_there_is_no_terminal(main_run: Ended) -> None:
    lines = [line for line in main_run.stderr.splitlines() if line.startswith("step ")]
    assert [re.match(r"step (\d)/3  reward [\d.]+ ", line)[1] for line in lines] == ["1", "2", "3"]
    assert "Traceback" not in main_run.stderr
    assert "Warning" not in main_run.stderr


def test_every_step_has_one_row_and_each_key_is_documented(main_run: Ended) -> None:
    assert main_run.column("step") == [1, 2, 3]
    assert [row.keys() - METRICS.keys() for row in main_run.metrics] == [{"step"}] * 3
    assert METRICS.keys() - main_run.metrics[0].keys() == WITH_OPTIONS  # nothing else is promised that is not there
    assert main_run.column("weights/version") == [1, 2, 3]


def test_engine_and_trainer_agree_at_every_step(main_run: Ended) -> None:
    assert max(main_run.column("rollout/logprob_diff_max")) <= 1e-3
    assert min(main_run.column("rollout/logprob_diff_max")) > 0  # two implementations, not one number twice


def test_a_step_changes_the_norm_of_the_parameters_by_little(main_run: Ended) -> None:
    """The norm is about 70, the learning rate 1e-3: no step moves it by as much as 1, and none leaves it alone."""
    assert all(0 < abs(delta) < 1 for delta in main_run.column("actor/param_norm_delta"))


def test_the_policy_that_sampled_is_the_reference_at_the_first_step_alone(main_run: Ended) -> None:
    first, *later = main_run.column("actor/ref_kl")
    assert first == pytest.approx(0, abs=1e-6)
    assert all(abs(kl) > 1e-4 for kl in later)


def test_rollouts_hold_what_the_engine_gave(scene: Scene, main_run: Ended) -> None:
    tokenizer = load_tokenizer(str(scene.folder / "model"))
    for step in (1, 2, 3):
        rows = main_run.rollouts(step)
        assert [row["sample_id"] for row in rows] == list(range(16))
        for row in rows:
            assert row.keys() == FIELDS | ROW_FIELDS | TEXTS
            assert row["weight_version"] == step - 1
            assert row["id"] == f"{row['source']}:{row['position']}" and row["position"] == row["row_id"] + 1
            assert row["prompt_ids"] == tokenizer.encode(row["prompt"])
            assert 1 <= len(row["response_ids"]) == len(row["logprobs"]) <= 6
            assert row["finish_reason"] == ("stop" if row["response_ids"][-1] == EOS else "length")
            assert EOS not in row["response_ids"][:-1]
            assert row["response"] == tokenizer.decode(row["response_ids"])
            assert row["reward"] == pytest.approx(sum(symbol in "02468" for symbol in row["response"]) / 6)
        assert sum(row["reward"] for row in rows) / 16 == pytest.approx(main_run.metrics[step - 1]["reward/mean"])
    # Ids that no text encodes to: had they been decoded and encoded again, they would be gone.
    sampled = {i for row in main_run.rollouts(1) for i in row["response_ids"]}
    assert TOKENIZER_SIZE in sampled


def test_log_probs_of_the_samples_equal_transformers_at_every_version(scene: Scene, main_run: Ended) -> None:
    for step in (1, 2, 3):
        check_log_probs(weights_of_version(scene, main_run, step - 1), main_run.rollouts(step), temperature=1.0)


def test_vllms_greedy_equals_transformers_after_every_publish(scene: Scene, main_run: Ended) -> None:
    """The same prompts at each version, half of them long: neither weights nor cached keys of an older version may be met."""
    answers = []
    for version in (0, 1, 2, 3):
        rows = main_run.greedy(version)
        assert {row["weight_version"] for row in rows} == {version}
        assert max(len(row["prompt_ids"]) for row in rows) > 128
        check_greedy(weights_of_version(scene, main_run, version), rows, max_new_tokens=6, eos=EOS)
        answers.append([row["response_ids"] for row in rows])
    assert all(before != after for before, after in itertools.pairwise(answers))


def test_the_final_folder_is_the_last_version_with_config_and_tokenizer(scene: Scene, main_run: Ended) -> None:
    final = load_file(main_run.run_dir / "final" / "model.safetensors")
    last = dict(hf_tensors(weights_of_version(scene, main_run, 3)))
    first = load_file(scene.folder / "model" / "model.safetensors")
    assert final.keys() == last.keys() == first.keys()
    assert all(torch.equal(final[name], last[name]) for name in final)
    assert all(final[name].shape == first[name].shape and not torch.equal(final[name], first[name]) for name in final)
    encoded = [load_tokenizer(str(folder)).encode("07+35=") for folder in (main_run.run_dir / "final", scene.folder / "model")]
    assert encoded[0] == encoded[1]


VLLM = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=206, max_num_seqs=16, enforce_eager=True,
          kv_cache_memory_bytes=32 << 20)
prompts = [{"prompt_token_ids": ids} for ids in json.load(sys.stdin)]
sampling = SamplingParams(temperature=0, max_tokens=6, detokenize=False)
print(json.dumps([list(found.outputs[0].token_ids) for found in llm.generate(prompts, sampling, use_tqdm=False)]))
"""


def test_vllm_loads_the_final_folder_by_itself(main_run: Ended) -> None:
    rows = main_run.greedy(3)
    done = subprocess.run(
        [sys.executable, "-c", VLLM, str(main_run.run_dir / "final")],
        input=json.dumps([row["prompt_ids"] for row in rows]),
        env=child_environment(os.environ, threads=1, device="cpu"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [row["response_ids"] for row in rows]


def test_the_resolved_config_is_the_config_with_every_key_decided(
    scene: Scene, main_run: Ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(scene.folder)
    written = load_config(str(main_run.run_dir / "config.resolved.yaml"), [])
    assert written == resolve(load_config("ppo.yaml", ["run.name=main", "run.dir=runs"]))
    assert (written.critic.path, written.reference.enabled, written.rollout.dtype) == ("model", True, "float32")


def test_all_leaves_the_devices_after_each_step_and_only_what_changed_is_copied(scene: Scene, main_run: Ended) -> None:
    tensors = load_file(scene.folder / "model" / "model.safetensors")
    padding = 15 * 64 * 4  # the vocabulary of 17 is padded to 32 rows of 64 floats
    actor = reference = sum(tensor.nbytes for tensor in tensors.values()) + 2 * padding
    critic = actor - 32 * 64 * 4 + 64 * 4  # a value head in place of the output layer
    # Parameters, gradients and two moments; the reference's parameters.
    assert main_run.column("memory/offloaded_bytes") == [4 * (actor + critic) + reference] * 3
    assert main_run.column("memory/to_host_bytes") == [3 * (actor + critic)] * 3
    # There are no moments before the first update. From step 2 on the save of the step before wanted actor and critic, too.
    first, *later = main_run.column("memory/to_device_bytes")
    assert first == actor + critic + reference
    assert later == [(3 + 1) * (actor + critic) + reference] * 2


def test_a_run_of_the_resolved_config_with_all_left_on_the_devices_is_the_same_run_bit_for_bit(
    scene: Scene, main_run: Ended
) -> None:
    stays = "offload={parameters: false, gradients: false, optimizer: false}"
    again = scene.run("again", stays, config=str(main_run.run_dir / "config.resolved.yaml"))
    assert not any(key.startswith("memory/to_") for key in again.metrics[0])
    assert again.deterministic_metrics == main_run.deterministic_metrics
    assert len(again.deterministic_metrics[0]) > 30
    for step in (1, 2, 3):
        assert again.rollouts_bytes(step) == main_run.rollouts_bytes(step)
    weights = Path("final") / "model.safetensors"
    assert (again.run_dir / weights).read_bytes() == (main_run.run_dir / weights).read_bytes()


def test_a_run_leaves_only_what_is_documented_in_its_folder(main_run: Ended) -> None:
    names = {path.name for path in main_run.run_dir.iterdir()}
    assert names == {"config.resolved.yaml", "metrics.jsonl", "rollouts", "validation", "checkpoints", "logs", "final"}
    assert {path.name for path in (main_run.run_dir / "logs").iterdir()} == {
        *("rank_00000.log", "rank_00001.log", "engine.log", "reward.log")
    }
    assert not list(main_run.run_dir.rglob("*.partial"))
    assert ROOT not in main_run.run_dir.parents
