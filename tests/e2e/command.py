"""How do tests run the command and look at what it leaves? `Scene.run`: the real `megappo`, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megappo.observe.metrics import is_deterministic, read_metrics

ROOT = Path(__file__).resolve().parents[2]
MARK = "MEGAPPO_TEST_MARK"
TIMEOUT_S = 240.0
WITH_OPTIONS = {
    "rollout/importance_mean",
    "rollout/importance_bounded",
    "rollout/sampling_rounds",
    "rollout/prompts_without_signal",
    "actor/kl_loss",
    "actor/kl_coef",
    "actor/dual_clipfrac",
}
"""Metrics that a run has with some options alone: `test_algorithms.py` sees them, the main run does not."""
_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ended:
    """What a command left: exit code, output, and its run folder."""

    code: int
    stdout: str
    stderr: str
    run_dir: Path

    @property
    def message(self) -> str:
        """The last line on stderr."""
        return self.stderr.rstrip().splitlines()[-1]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.run_dir / "metrics.jsonl")

    @property
    def deterministic_metrics(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if is_deterministic(key)} for row in self.metrics]

    @property
    def failure(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "failure.json").read_text())

    def column(self, key: str) -> list[float]:
        return [row[key] for row in self.metrics]

    def rollouts(self, step: int, folder: str = "rollouts") -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.rollouts_bytes(step, folder).splitlines()]

    def greedy(self, step: int) -> list[dict[str, Any]]:
        """The greedy rows of a validation."""
        return [row for row in self.rollouts(step, "validation") if row["temperature"] == 0]

    def rollouts_bytes(self, step: int, folder: str = "rollouts") -> bytes:
        return (self.run_dir / folder / f"step_{step:06d}.jsonl").read_bytes()


@dataclass
class Running:
    """A command under way. Every process that it starts carries its mark in the environment."""

    process: subprocess.Popen[str]
    run_dir: Path
    mark: str
    shared_memory: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        threading.Thread(target=self._watch_shared_memory, daemon=True).start()

    def members(self) -> list[psutil.Process]:
        """The command and everything that runs because of it."""
        return [process for process in psutil.process_iter() if _has_mark(process, self.mark)]

    def ranks(self) -> dict[int, psutil.Process]:
        """The forked ranks by number, which is the order of their start."""
        children = psutil.Process(self.process.pid).children()
        return dict(enumerate(sorted(children, key=lambda child: (child.create_time(), child.pid))))

    def engine(self) -> psutil.Process | None:
        """vLLM's process, once it is there."""
        return next((process for process in self.members() if _is_engine(process)), None)

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Until the condition holds; the command must not end before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"the command ended before {what}: {self.process.communicate()}"
            assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s"
            time.sleep(0.02)

    def wait_for_steps(self, count: int) -> None:
        path = self.run_dir / "metrics.jsonl"
        self.wait_for(lambda: path.exists() and path.read_text().count("\n") >= count, f"step {count}")

    def ended(self, timeout_s: float = TIMEOUT_S) -> Ended:
        """Wait for the end. Nothing may be left of it: no process, no shared memory."""
        try:
            stdout, stderr = self.process.communicate(timeout=timeout_s)
            assert not (left := _becomes_empty(self.members)), f"processes of the run outlived it: {left}"
            assert not (left := _becomes_empty(self._leaked)), f"the run left shared memory: {left}"
        finally:
            self.kill()
        return Ended(self.process.returncode, stdout, stderr, self.run_dir)

    def kill(self) -> None:
        """Whatever still runs, after a test that failed."""
        for process in self.members():
            process.kill()
        self.process.wait()

    def _watch_shared_memory(self) -> None:
        """Remember every name in shared memory that a process of the run has mapped. (Other runs of this machine have others.)"""
        while self.process.poll() is None:
            for process in self.members():
                self.shared_memory |= _mapped_shared_memory(process.pid)
            time.sleep(0.3)

    def _leaked(self) -> list[str]:
        return sorted(name for name in self.shared_memory if Path("/dev/shm", name).exists())


@dataclass(frozen=True)
class Scene:
    """A folder with a model, a tokenizer, data, a reward function and `ppo.yaml`; runs go to `runs/`."""

    folder: Path

    def start(
        self,
        name: str,
        *overrides: str,
        command: str = "train",
        config: str = "ppo.yaml",
        runs: str = "runs",
        program: Sequence[str] = ("-m", "megappo"),
        env: Mapping[str, str] | None = None,
    ) -> Running:
        """`megappo COMMAND CONFIG run.name=NAME ...`, started in the folder."""
        arguments = [*program, command, config, f"run.name={name}", f"run.dir={runs}", *overrides]
        return self._start(arguments, self.folder / runs / name, env)

    def _start(self, arguments: Sequence[str], run_dir: Path, env: Mapping[str, str] | None = None) -> Running:
        mark = uuid.uuid4().hex
        environment = {key: value for key, value in os.environ.items() if key not in _LAUNCHERS}
        environment |= {"PYTHONPATH": str(ROOT), MARK: mark, **(env or {})}
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return Running(process, run_dir, mark)

    def call(self, *arguments: str, program: Sequence[str] = ("-m", "megappo"), expect: int = 0) -> Ended:
        """`megappo ARGUMENTS`, of a command that has no config, to its end."""
        ended = self._start([*program, *arguments], self.folder).ended()
        assert ended.code == expect, f"exit code {ended.code}\n{ended.stdout}\n{ended.stderr}"
        return ended

    def run(self, name: str, *overrides: str, expect: int = 0, **options: Any) -> Ended:
        """Run the command to its end, which must be the exit code `expect`."""
        ended = self.start(name, *overrides, **options).ended()
        assert ended.code == expect, f"exit code {ended.code}\n{ended.stdout}\n{ended.stderr}"
        return ended


def send(process: psutil.Process | subprocess.Popen[str], number: signal.Signals) -> None:
    os.kill(process.pid, number)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return False


def _is_engine(process: psutil.Process) -> bool:
    try:
        return "megappo.rollout.vllm_child" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def _becomes_empty(look: Callable[[], list[Any]], seconds: float = 5.0) -> list[Any]:
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _mapped_shared_memory(pid: int) -> set[str]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except OSError:
        return set()  # it has ended
    names = {line.partition("/dev/shm/")[2] for line in maps.splitlines() if "/dev/shm/" in line}
    return {name for name in names if name and not name.endswith("(deleted)")}
