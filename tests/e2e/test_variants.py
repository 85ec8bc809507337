"""What else can a run be? Started by torchrun, with the hf engine, in bfloat16, by token budget, or a warm start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megappo.data.tokenizer import load_tokenizer
from tests.e2e.command import Ended, Scene
from tests.e2e.reference import check_greedy, load

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

HF = ("rollout.engine=hf", "actor.parallel={pp: 2}", "data.shuffle=false", "trainer.steps=2", "trainer.batch_size=8")
HF += ("eval.max_rows=4",)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megappo")


@pytest.fixture(scope="module")
def hf_runs(scene: Scene) -> tuple[Ended, Ended]:
    """Two runs into one folder: the second has another seed, and sets the first one's folder aside."""
    first = scene.run("hf", *HF)
    second = scene.run("hf", *HF, "run.seed=99", "trainer.steps=1")
    return Ended(first.code, first.stdout, first.stderr, scene.folder / "runs" / "hf.1"), second


def test_a_run_without_vllm_keeps_the_same_promises(hf_runs: tuple[Ended, Ended]) -> None:
    run, _ = hf_runs
    assert 0 < max(run.column("rollout/logprob_diff_max")) <= 1e-3
    for step in (1, 2):
        folder = run.run_dir / "checkpoints" / f"step_{step:06d}" / "actor"
        check_greedy(folder, run.greedy(step), max_new_tokens=6, eos=2)


def test_a_second_run_of_a_name_keeps_the_older_folder_aside(hf_runs: tuple[Ended, Ended]) -> None:
    first, second = hf_runs
    assert (first.column("step"), second.column("step")) == ([1, 2], [1])
    assert "seed: 1234" in (first.run_dir / "config.resolved.yaml").read_text()
    assert "seed: 99" in (second.run_dir / "config.resolved.yaml").read_text()


def test_another_seed_draws_other_samples_for_the_same_prompts(hf_runs: tuple[Ended, Ended]) -> None:
    first, second = (run.rollouts(1) for run in hf_runs)
    assert [row["prompt_ids"] for row in first] == [row["prompt_ids"] for row in second]
    assert sum(a["response_ids"] == b["response_ids"] for a, b in zip(first, second, strict=True)) <= 1


def test_ranks_that_torchrun_started_make_the_same_run(scene: Scene, hf_runs: tuple[Ended, Ended]) -> None:
    run = scene.run("torchrun", *HF, program=TORCHRUN)
    assert run.deterministic_metrics == hf_runs[0].deterministic_metrics
    assert run.rollouts_bytes(2) == hf_runs[0].rollouts_bytes(2)
    assert run.stdout.splitlines()[-2:] == hf_runs[0].stdout.splitlines()[-2:]


@pytest.mark.long
def test_ranks_that_only_generate_make_the_same_run(scene: Scene, hf_runs: tuple[Ended, Ended]) -> None:
    """But for the last bits of the engine's own log-probs: transformers pads the prompts of a call to the longest."""
    own = ("rollout.engines=2", "rollout.own_ranks=true")
    run = scene.run("own_ranks", *HF, *own, program=(*TORCHRUN[:4], "4", *TORCHRUN[5:]))
    differences = {"rollout/logprob_diff_max", "rollout/logprob_diff_mean"}
    of_the_engine = differences | {"rollout/effective_sample_fraction"}
    for row, wanted in zip(run.deterministic_metrics, hf_runs[0].deterministic_metrics, strict=True):
        assert {key: row[key] for key in row.keys() - of_the_engine} == {
            key: wanted[key] for key in wanted.keys() - of_the_engine
        }
        assert all(row[key] <= 1e-5 for key in differences)
        assert row["rollout/effective_sample_fraction"] == pytest.approx(1, abs=1e-5)
    for step in (1, 2):
        for row, wanted in zip(run.rollouts(step), hf_runs[0].rollouts(step), strict=True):
            assert {**row, "logprobs": None} == {**wanted, "logprobs": None}
    final = [load_file(ended.run_dir / "final" / "model.safetensors") for ended in (run, hf_runs[0])]
    assert all(torch.equal(final[0][name], final[1][name]) for name in final[1])


@pytest.mark.vllm
def test_two_engines_on_ranks_that_train_make_the_run_of_one(scene: Scene, main_run: Ended) -> None:
    two = ("rollout.engines=2", "pp_weights.to_engines=broadcast", "pp_weights.mode=bucketed", "pp_weights.bucket_bytes=20000")
    run = scene.run("two_engines", *two, "trainer.steps=2", "trainer.save_every=0")
    assert run.deterministic_metrics == main_run.deterministic_metrics[:2]
    for step in (1, 2):
        assert run.rollouts_bytes(step) == main_run.rollouts_bytes(step)
        assert run.rollouts_bytes(step, "validation") == main_run.rollouts_bytes(step, "validation")
    assert {path.name for path in (run.run_dir / "logs").glob("engine*")} == {"engine.log", "engine_1.log"}


@pytest.mark.vllm
def test_bfloat16_with_micro_batches_by_tokens_and_the_builtin_reward(scene: Scene) -> None:
    folder = scene.folder / "soft"
    shutil.copytree(scene.folder / "model", folder)
    tensors = load_file(folder / "model.safetensors")
    # With the random model's large logits, bfloat16's rounding alone would exceed the tolerance.
    softened = {name: tensor * 0.3 if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}
    save_file(softened, folder / "model.safetensors", metadata={"format": "pt"})
    run = scene.run(
        "bf16",
        "model.path=soft",
        "model.dtype=bfloat16",
        "actor.micro_batch_tokens=420",
        "critic.micro_batch_tokens=420",
        "reward.function=exact_match",
        "trainer.steps=2",
        "trainer.validate_every=0",
        "trainer.save_every=0",
    )
    assert max(run.column("rollout/logprob_diff_max")) <= 5e-2
    assert all(0 < norm < 1000 for norm in run.column("actor/grad_norm"))
    final = load_file(run.run_dir / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in final.values()} == {torch.bfloat16}
    assert load(run.run_dir / "final").config.num_hidden_layers == 4


def test_sft_writes_a_folder_that_transformers_loads(scene: Scene) -> None:
    """Nine sums, learned by heart: the greedy answers that transformers gives are then the answers of the data."""
    rows = (scene.folder / "train.jsonl").read_text().splitlines()[1:18:2]
    (scene.folder / "nine.jsonl").write_text("\n".join(rows) + "\n")
    scene.run(
        "sft",
        "data.train=nine.jsonl",
        "data.validation=nine.jsonl",
        "rollout.engine=hf",
        "actor.parallel={pp: 2}",
        "actor.optimizer.lr=0.003",
        "actor.micro_batch_size=9",
        "sft={steps: 100, batch_size: 9, evaluate_every: 5, stop_at_accuracy: 0.9, output: warm}",
        "reward.function=exact_match",
        command="sft",
    )
    warm = scene.folder / "warm"
    assert {path.name for path in warm.iterdir()} >= {"config.json", "model.safetensors", "tokenizer.model"}
    assert exact_answers(warm, rows) >= 8
    assert exact_answers(scene.folder / "model", rows) == 0


def exact_answers(folder: Path, rows: list[str]) -> int:
    tokenizer, model, count = load_tokenizer(str(folder)), load(folder), 0
    for row in map(json.loads, rows):
        prompt = tokenizer.encode(row["prompt"])
        found = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :]
        count += tokenizer.decode(found.tolist()) == row["answer"]
    return count
