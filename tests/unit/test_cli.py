"""What does the command do with its arguments, and how does it end?"""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

import megappo.trainer
from megappo import cli
from megappo.config.check import Plan
from megappo.errors import RunFailed, UserError
from tests.unit.test_check_config import write_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    write_model(tmp_path / "m")
    (tmp_path / "t.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    path = tmp_path / "c.yaml"
    path.write_text(
        "{model: {path: m}, data: {train: t.jsonl}, sft: {output: o}, trainer: {batch_size: 64},"
        "rollout: {max_prompt_tokens: 64, max_new_tokens: 32, engine: hf}}"
    )
    return path


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stands in for the trainer: remembers the plan, then does what `act` says."""
    seen = types.SimpleNamespace(calls=[], act=lambda: 0)

    def command(name: str):
        def run(plan: Plan) -> int:
            seen.calls.append((name, plan))
            return seen.act()

        return run

    module = types.ModuleType("megappo.trainer.run")
    module.train, module.sft = command("train"), command("sft")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megappo.trainer.run", module)
    monkeypatch.setattr(megappo.trainer, "run", module, raising=False)
    return seen


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_command_gets_the_plan_of_the_config_with_its_overrides(config: Path, trainer, command: str) -> None:
    assert cli.main([command, "c.yaml", "trainer.steps=3", "sft.steps=4"]) == 0
    ((called, given),) = trainer.calls
    assert called == command
    config = given.config
    assert (config.trainer.steps, config.sft.steps, config.model.path) == (3, 4, "m")


def test_the_commands_result_is_the_exit_code(config: Path, trainer) -> None:
    trainer.act = lambda: 7
    assert cli.main(["train", "c.yaml"]) == 7


@pytest.mark.parametrize(
    "error, code, message",
    [
        (UserError("data.train: line 3 is broken"), 2, "data.train: line 3 is broken"),
        (RunFailed("rank 1 ended with signal 9"), 1, "rank 1 ended with signal 9"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_stderr_ends_with_the_message_of_what_ended_the_run(
    config: Path, trainer, capsys, error, code: int, message: str
) -> None:
    def act() -> int:
        raise error

    trainer.act = act
    assert cli.main(["train", "c.yaml"]) == code
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1] == message
    assert "Traceback" not in captured.err


def test_our_own_bugs_keep_their_traceback(config: Path, trainer) -> None:
    def act() -> int:
        raise AssertionError("a bug")

    trainer.act = act
    with pytest.raises(AssertionError, match="a bug"):
        cli.main(["train", "c.yaml"])


def test_a_refused_config_exits_with_2_and_never_reaches_the_trainer(config: Path, trainer, capsys) -> None:
    assert cli.main(["train", "c.yaml", "lerning_rate=1", "trainer.steps=many"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "lerning_rate is not a key; did you mean actor.optimizer.lr?",
        "trainer.steps='many' is a string; give an integer, e.g. 100",
    ]
    assert cli.main(["train", "c.yaml", "actor.parallel.pp=3"]) == 2
    assert not trainer.calls


def test_of_the_ranks_of_a_host_one_reports_the_refusal(config: Path, trainer, capsys, monkeypatch) -> None:
    for rank, lines in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert cli.main(["train", "c.yaml", "lerning_rate=1"]) == 2
        assert len(capsys.readouterr().err.splitlines()) == lines


def test_a_launchers_world_size_is_checked(config: Path, trainer, capsys, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train", "c.yaml"]) == 2
    assert capsys.readouterr().err.startswith(
        "WORLD_SIZE=2, but actor.parallel needs tp x cp x pp x dp = 1 x 1 x 1 x 1 = 1 ranks"
    )
    assert cli.main(["train", "c.yaml", "run.launcher=local"]) == 0


@pytest.mark.parametrize("arguments", [[], ["train"], ["tarin", "c.yaml"], ["train", "c.yaml", "--actor.epochs=2"]])
def test_a_wrong_command_line_exits_with_2(arguments: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def run(*arguments: str, cwd: Path, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(("-c", code) if code else ("-m", "megappo")), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_package_runs_as_a_module(tmp_path: Path) -> None:
    done = run("--version", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"megappo {megappo.__version__}\n")


def test_a_refused_config_is_one_line_and_exit_code_2(config: Path) -> None:
    done = run("train", "c.yaml", "actor.parallel.pp=3", cwd=config.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("actor.parallel.pp=3 does not divide num_layers=8; use 1, 2, 4 or 8")


def test_a_config_that_holds_is_checked_without_torch(config: Path) -> None:
    code = (
        "import sys\n"
        "from megappo.config.check import check_config\n"
        "from megappo.config.load import load_config\n"
        "check_config(load_config('c.yaml'))\n"
        "sys.exit(bool({'torch', 'megatron', 'transformers', 'vllm', 'ray'} & set(sys.modules)))\n"
    )
    done = run(cwd=config.parent, code=code)
    assert done.returncode == 0, done.stderr
