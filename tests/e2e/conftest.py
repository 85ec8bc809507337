"""What do the end-to-end tests share? A scene to run in, and the runs that several tests look at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import demo_model
from tests.e2e.command import Ended, Scene
from tests.models import make_llama_folder

# The model knows one token more than the tokenizer, as many published models do.
VOCAB_SIZE = demo_model.MODEL["vocab_size"] + 1

CONFIG = """
model: {path: model}
data: {train: train.jsonl, validation: validation.jsonl}
reward: {function: "reward.py:share_of_even_digits"}
algorithm: {kl_coef: 0.01}
rollout: {max_prompt_tokens: 200, max_new_tokens: 6, max_num_seqs: 32, kv_cache_bytes: 33554432}
actor:
  parallel: {pp: 2, vpp: 2}
  mini_batch_size: 8
  micro_batch_size: 2
  entropy_coef: 0.01
  optimizer: {lr: 0.001}
critic:
  mini_batch_size: 8
  micro_batch_size: 2
  optimizer: {lr: 0.001}
offload: {parameters: true, gradients: true, optimizer: true}
trainer: {steps: 3, batch_size: 16, validate_every: 1, save_every: 1}
eval: {max_rows: 12, samples: 2, pass_score: 0.5}
run: {watchdog_s: 30}
"""

REWARD = '''
def share_of_even_digits(prompt, response, answer, row):
    """A reward that a random model gets something of."""
    return sum(symbol in "02468" for symbol in response) / 6


def always_the_same(prompt, response, answer, row):
    return 0.5


def fails_at_step_2(prompt, response, answer, row, calls=[]):
    calls.append(prompt)
    if len(calls) > 16:
        raise ZeroDivisionError("no score for you")
    return 0.5


def hangs_at_step_2(prompt, response, answer, row, calls=[]):
    calls.append(prompt)
    while len(calls) > 8:
        pass
    return 0.5


def hangs_for_a_third(prompt, response, answer, row):
    print("scoring", prompt[-6:])
    while int(answer) % 3 == 0:
        pass
    return len(response)
'''


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("scene")
    model = make_llama_folder(folder / "model", tied=False, vocab_size=VOCAB_SIZE)
    demo_model.write_tokenizer(model, demo_model.write_data(folder))
    for name in ("train", "validation"):
        _lengthen(folder / f"{name}.jsonl")
    (folder / "reward.py").write_text(REWARD)
    (folder / "ppo.yaml").write_text(CONFIG)
    return Scene(folder)


def _lengthen(path: Path) -> None:
    """Every second prompt becomes longer than a block of vLLM's KV cache, so that its prefix cache has something to hold."""
    rows = [json.loads(line) for line in path.read_text().splitlines()[:64]]
    solved = "".join(row["prompt"] + row["answer"] for row in rows[:20])
    for i in range(0, len(rows), 2):
        rows[i]["prompt"] = solved + rows[i]["prompt"]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def main_run(scene: Scene) -> Ended:
    """PPO on 2 stages x 2 chunks with vLLM, critic and reference; 3 steps, each validated and saved."""
    return scene.run("main")
