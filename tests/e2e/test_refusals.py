"""Is a config that cannot run refused at once? One clear line, exit code 2, no torch, no run folder."""

from __future__ import annotations

import pytest

from tests.e2e.command import Scene

WITHOUT_TORCH = """
import sys
from megappo.cli import main
code = main(sys.argv[1:])
assert not {"torch", "transformers", "megatron", "vllm"} & set(sys.modules), "heavy imports"
sys.exit(code)
"""


@pytest.mark.parametrize(
    "override, message",
    [
        ("actor.optimizer.learning_rate=1", "actor.optimizer.learning_rate is not a key; did you mean actor.optimizer.lr?"),
        ("actor.parallel.pp=3", "actor.parallel.pp=3 does not divide num_layers=4; use 1, 2 or 4"),
        ("model.path=no/such/model", "model.path='no/such/model'"),
        ("data.train=no_such.jsonl", "data.train='no_such.jsonl' does not exist; give a .jsonl or"),
    ],
    ids=["unknown key", "pp does not divide", "no model", "no data"],
)
def test_a_refused_config_says_why_in_one_line(scene: Scene, override: str, message: str) -> None:
    extra = ("actor.parallel.vpp=1",) if "pp=3" in override else ()
    ended = scene.run("refused", override, *extra, expect=2, program=("-c", WITHOUT_TORCH))
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
    assert ended.message.startswith(message)
    assert not ended.run_dir.exists()
