"""Does reward code run where it can harm nothing but itself? The processes of the pool: limits, order, output, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megappo.errors import RunFailed
from megappo.rewards.call import Outcome, ScoreRequest
from megappo.rewards.parts import Part
from megappo.rewards.pool import RewardPool

REWARD = """
import os, pathlib, subprocess, sys, time

executed = pathlib.Path(__file__).with_suffix(".executed")
executed.open("a").write(f"{os.getpid()} ")

def pid(prompt, response, answer, row):
    return os.getpid()

def number(prompt, response, answer, row):
    time.sleep(row.get("sleep", 0))
    return float(response)

def environment(prompt, response, answer, row):
    return float(os.environ["OMP_NUM_THREADS"]) + (10 if "torch" in sys.modules else 0)

def says(prompt, response, answer, row):
    print("said", response)
    print("complained", response, file=sys.stderr)
    return 1.0

def starts_a_child_and_hangs(prompt, response, answer, row):
    child = subprocess.Popen(["sleep", "1000"])
    pathlib.Path(__file__).with_suffix(".child").write_text(str(child.pid))
    child.wait()

def hangs_in_c(prompt, response, answer, row):
    import re
    return float(bool(re.match(r"(a+)+$", "a" * 40 + "b")))  # holds the interpreter's lock for years
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(REWARD)
    return path


@pytest.fixture
def pool_of(file: Path) -> Iterator[Callable[..., RewardPool]]:
    pools = []

    def make(*functions: str, workers: int = 1, timeout_s: float = 20.0, log_path: Path | None = None) -> RewardPool:
        parts = [Part("reward.function", f"{file}:{function}", 1.0, function) for function in functions]
        pools.append(RewardPool(parts, workers, timeout_s, log_path))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def request(response: str = "1", **row: Any) -> ScoreRequest:
    return ScoreRequest("sample", "p", response, "a", row)


def run(pool: RewardPool, *requests: ScoreRequest) -> list[Outcome]:
    found = dict(pool.run(0, dict(enumerate(requests))))
    return [found[i] for i in range(len(requests))]


def pids(pool: RewardPool) -> set[int]:
    return {worker.process.pid for worker in pool._workers}


def test_the_file_is_executed_once_a_worker_and_never_in_the_driver(pool_of: Callable[..., RewardPool], file: Path) -> None:
    pool = pool_of("number", "pid", workers=2)
    run(pool, *[request()] * 20)
    executed = [int(pid) for pid in file.with_suffix(".executed").read_text().split()]
    assert sorted(executed) == sorted(pids(pool))
    assert os.getpid() not in executed


def test_calls_of_several_workers_keep_their_places(pool_of: Callable[..., RewardPool]) -> None:
    pool = pool_of("number", workers=2)
    outcomes = run(pool, *[request(str(i), sleep=0.2 if i == 0 else 0.0) for i in range(10)])
    assert [outcome.value for outcome in outcomes] == list(range(10))


def test_the_limit_is_for_each_call_and_only_the_slow_one_fails(pool_of: Callable[..., RewardPool]) -> None:
    pool = pool_of("number", timeout_s=1.0)
    start = time.monotonic()
    outcomes = run(pool, *[request(str(i), sleep=1000 if i == 2 else 0.4) for i in range(5)])
    assert [outcome.value for outcome in outcomes] == [0, 1, 0, 3, 4]
    assert [outcome.problem for outcome in outcomes] == [None, None, "took longer than reward.timeout_s=1", None, None]
    assert time.monotonic() - start < 10  # four calls of 0.4 s, one limit, one start


def test_a_call_that_holds_the_interpreters_lock_is_ended_too(pool_of: Callable[..., RewardPool]) -> None:
    pool = pool_of("hangs_in_c", timeout_s=0.5)
    assert run(pool, request()) == [Outcome(0.0, "took longer than reward.timeout_s=0.5")]


def test_what_a_call_has_started_ends_with_it(pool_of: Callable[..., RewardPool], file: Path) -> None:
    pool = pool_of("starts_a_child_and_hangs", timeout_s=1.0)
    (outcome,) = run(pool, request())
    assert outcome.problem == "took longer than reward.timeout_s=1"
    child = int(file.with_suffix(".child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_row_that_cannot_travel_is_the_samples_failure(pool_of: Callable[..., RewardPool]) -> None:
    outcomes = run(pool_of("number"), request("1"), request("2", key=lambda: 1), request("3"))
    assert [outcome.value for outcome in outcomes] == [1, 0, 3]
    assert "cannot be given the row, which does not pickle" in str(outcomes[1].problem)


def test_a_caller_that_wants_no_more_leaves_nothing_under_way(pool_of: Callable[..., RewardPool]) -> None:
    pool = pool_of("number", workers=2)
    calls = pool.run(0, {i: request("1", sleep=1000 if i == 1 else 0) for i in range(4)})
    assert next(calls) == (0, Outcome(1.0))
    calls.close()
    assert [outcome.value for outcome in run(pool, request("5"), request("6"))] == [5, 6]


def test_a_file_that_has_changed_for_the_worse_ends_the_run(pool_of: Callable[..., RewardPool], file: Path) -> None:
    pool = pool_of("number", timeout_s=0.5)
    file.write_text("1 / 0")
    with pytest.raises(RunFailed, match=r"had to be replaced, and its successor cannot be started: .*ZeroDivisionError"):
        run(pool, request(sleep=1000), request())


def test_workers_have_one_thread_and_no_torch(pool_of: Callable[..., RewardPool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert run(pool_of("environment"), request()) == [Outcome(1.0)]


def test_a_worker_starts_in_a_moment(pool_of: Callable[..., RewardPool]) -> None:
    start = time.monotonic()
    pool_of("number")
    assert time.monotonic() - start < 5  # 0.2 s on an idle machine


def test_what_the_code_prints_goes_to_the_log(pool_of: Callable[..., RewardPool], tmp_path: Path) -> None:
    log = tmp_path / "logs" / "reward.log"
    run(pool_of("says", log_path=log), request("this"), request("that"))
    assert log.read_text().splitlines() == ["said this", "complained this", "said that", "complained that"]


def test_without_a_log_it_goes_to_stderr(pool_of: Callable[..., RewardPool], capfd: pytest.CaptureFixture[str]) -> None:
    run(pool_of("says"), request("this"))
    out, err = capfd.readouterr()
    assert (out, err.splitlines()) == ("", ["said this", "complained this"])


def test_the_traceback_of_a_failed_import_goes_to_the_log(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def helper():\n    return 1 / 0\nhelper()\n")
    with pytest.raises(ValueError, match="raised ZeroDivisionError"):
        RewardPool([Part("reward.function", f"{tmp_path}/broken.py:f", 1.0, "f")], 1, 5.0, tmp_path / "reward.log")
    assert "in helper" in (tmp_path / "reward.log").read_text()


# -- the end --------------------------------------------------------------------------------------------------------

DRIVER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a shell
from megappo.rewards.call import ScoreRequest
from megappo.rewards.parts import Part
from megappo.rewards.pool import RewardPool

pool = RewardPool([Part("reward.function", sys.argv[1], 1.0, "f")], 2, 1000.0)
print(*[worker.process.pid for worker in pool._workers], flush=True)
list(pool.run(0, {0: ScoreRequest("s", "p", "r", "a", {})}))
"""


def test_closing_ends_the_workers_and_lets_their_exit_handlers_run(pool_of: Callable[..., RewardPool], file: Path) -> None:
    file.write_text(
        REWARD + "import atexit\natexit.register(lambda: pathlib.Path(__file__).with_suffix('.bye').write_text('bye'))\n"
    )
    pool = pool_of("number")
    (pid,) = pids(pool)
    pool.close()
    assert file.with_suffix(".bye").read_text() == "bye"
    assert not psutil.pid_exists(pid)
    pool.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["SIGKILL", "SIGINT"])
def test_workers_end_with_a_driver_that_is_killed(file: Path, tmp_path: Path, number: signal.Signals) -> None:
    """One worker is stuck in C code, one waits. Only the driver has a traceback to show, and that for Ctrl-C alone."""
    with (tmp_path / "stderr").open("w") as stderr:
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, f"{file}:hangs_in_c"], stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    assert driver.stdout is not None
    workers = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(running(*workers)) == 2
    time.sleep(0.3)  # the call is under way
    driver.send_signal(number)
    try:
        driver.wait(timeout=10)
    finally:
        driver.kill()
    deadline = time.monotonic() + 5
    while left := running(*workers):
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
    assert (tmp_path / "stderr").read_text().count("Traceback") == (1 if number is signal.SIGINT else 0)


def running(*groups: int) -> list[str]:
    """Names of the processes in these process groups; what has ended and is not yet reaped is not among them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) in groups and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
    return found
