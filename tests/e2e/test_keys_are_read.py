"""Is every key of the config obeyed? What no command ever reads outside of its own checks has no effect, and must go."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from megappo.config import schema, schema_learning, schema_models
from tests.e2e.command import Scene

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.distributed, pytest.mark.vllm]

# Runs the command, and notes in a file each field of the schema that code outside of megappo.config reads, in any process.
# (check_layouts and check_engines count: they make the layouts and the placement that a run uses.)
RECORDING = """
import os, sys
from dataclasses import is_dataclass
from megappo.config import schema, schema_learning, schema_models

file, *sys.argv[1:] = sys.argv[1:]
notes = os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
seen = set()

def recording(cls):
    plain = cls.__getattribute__
    def read(self, name):
        caller = sys._getframe(1).f_globals.get("__name__", "")
        plans = ("megappo.config.check_layouts", "megappo.config.check_engines")
        checks = caller.startswith(("megappo.config", "dataclasses", "__main__")) and caller not in plans
        if (cls, name) not in seen and not checks:
            seen.add((cls, name))
            os.write(notes, f"{type(self).__name__}.{name}\\n".encode())
        return plain(self, name)
    cls.__getattribute__ = read

for item in [item for module in (schema, schema_learning, schema_models) for item in vars(module).values()]:
    if is_dataclass(item) and "__getattribute__" not in vars(item):
        recording(item)

if __name__ == "__main__":
    from megappo.cli import main
    sys.exit(main())
"""
DECIDED_BY_THE_CHECKS = {  # read where the config is checked or resolved, which settles them
    "WeightsConfig.mode",  # one choice so far
}


def all_fields() -> set[str]:
    """Class.field of every leaf of the schema; a class that extends another has the inherited fields, too."""
    items = {item for module in (schema, schema_learning, schema_models) for item in vars(module).values() if is_dataclass(item)}
    sections = items - {schema.Config, schema_models.UpdateConfig}
    return {f"{section.__name__}.{field.name}" for section in sections for field in fields(section)} & {
        f"{section.__name__}.{name}" for section in sections for name in get_type_hints(section)
    }


def test_every_key_is_read_by_some_command(scene: Scene, tmp_path: Path) -> None:
    notes = tmp_path / "read.txt"
    program = ("-c", RECORDING, str(notes))
    parts = "reward.parts=[{function: 'reward.py:share_of_even_digits', weight: 2.0, name: even}]"
    short = ("trainer.steps=2", "actor.parallel={pp: 1, vpp: 1}", "eval.max_rows=2", "data.overlong=truncate_left")
    short += (
        "rollout.max_prompt_tokens=100",
        "algorithm={kl_coef: 0.1, kl_target: 0.1, kl_loss_coef: 0.1}",
        "reward.overlong_buffer=2",
    )
    scene.run("read", *short, "reward.function=exact_match", parts, program=program)
    hf = ("rollout.engine=hf", "actor.parallel={pp: 1, vpp: 1}")
    groups = (
        "algorithm.advantages=grpo",
        "algorithm.importance.bound=truncated",
        "rollout.n=2",
        "trainer.batch_size=8",
        "trainer.steps=1",
    )
    scene.run("read-groups", *hf, *groups, "eval.max_rows=2", program=program)
    scene.run(
        "read-sft",
        *hf,
        "rollout.own_ranks=true",
        "sft={steps: 2, batch_size: 4, evaluate_every: 1, output: warm-read}",
        command="sft",
        program=program,
    )
    task = ("data.validation=reasoning_gym:chain_sum", "data.task_size=2", "data.task_options={max_terms: 2}")
    scene.run("read-eval", *hf, *task, command="eval", program=program)
    unread = all_fields() - set(notes.read_text().split()) - DECIDED_BY_THE_CHECKS
    assert sorted(unread) == []
