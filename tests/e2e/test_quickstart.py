"""Does docs/quickstart.md work as it stands? Its files are written and its commands run, on a tiny Qwen2.

The first training run has vLLM, as on the page; what measures and what starts again takes the quicker hf engine.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megappo.observe.metrics import read_metrics
from tests.e2e.command import ROOT
from tests.models import make_model_folder

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.distributed, pytest.mark.vllm]

PAGE = (ROOT / "docs" / "quickstart.md").read_text()
FILES = dict(re.findall(r"```\w+ file=(\S+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{{ eos_token }}{% endfor %}"


def make_model(folder: Path) -> None:
    """A Qwen2 with a sentencepiece tokenizer of single characters and a chat template."""
    import sentencepiece

    make_model_folder(folder, "qwen2", tied=True, layers=2)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["What is 0123456789 + - = ? [ ] ."]),
        model_prefix=str(folder / "tokenizer"),
        model_type="char",
        vocab_size=61,
        hard_vocab_limit=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        character_coverage=1.0,
        minloglevel=2,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "chat_template": TEMPLATE}))


def test_every_command_of_the_page_works_in_its_order(tmp_path: Path) -> None:
    make_model(tmp_path / "my-model")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    assert FILES.keys() == {"train.jsonl", "held_out.jsonl", "reward.py", "mine.yaml"}
    assert [command.split()[1] for command in COMMANDS] == ["eval", "train", "eval", "export", "import", "train"]
    printed = []
    for command in COMMANDS:
        program, *arguments = shlex.split(command)
        assert program == "megappo"
        if arguments != ["train", "mine.yaml"] and arguments[0] in ("eval", "train"):
            arguments.append("rollout.engine=hf")
        done = subprocess.run(
            [sys.executable, "-m", "megappo", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        printed.append(done.stdout.splitlines())
    before, trained, after, *_ = printed
    assert before[0] == "rows: 2"
    assert before[1].startswith("greedy accuracy: ")
    assert trained[-1].startswith("held-out accuracy: ")
    assert after[0] == "rows: 2"
    metrics = read_metrics(tmp_path / "runs" / "mine" / "metrics.jsonl")
    assert max(row["rollout/logprob_diff_max"] for row in metrics) <= 1e-3
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    assert read_metrics(tmp_path / "runs" / "from-checkpoint" / "metrics.jsonl")[0]["step"] == 1
