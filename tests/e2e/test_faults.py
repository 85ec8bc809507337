"""How does a run end that cannot go on? Soon, with one message that names the first cause, and nothing left of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import psutil
import pytest

from megappo.observe.metrics import METRICS
from tests.e2e.command import Ended, Running, Scene, send

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.distributed]

WATCHDOG_S = 30
HF = ("rollout.engine=hf", "actor.parallel={pp: 2}", "trainer.batch_size=8", "eval.max_rows=4")
ENDLESS = ("trainer.steps=100000", "trainer.validate_every=0", "trainer.save_every=0")


def break_in_step_2(running: Running, victim: Callable[[], psutil.Process | None], number: signal.Signals) -> tuple[Ended, int]:
    """Send the signal in the middle of the second step or soon after. Gives the end and the victim's process id."""
    try:
        running.wait_for_steps(1)
        process = victim()
        assert process is not None
        send(process, number)
        ended = running.ended(timeout_s=WATCHDOG_S)
    finally:
        running.kill()
    assert not (ended.run_dir / "final").exists()
    assert ended.stdout == ""
    return ended, process.pid


def test_a_killed_rank_is_named(scene: Scene) -> None:
    running = scene.start("kill_rank_1", *HF, *ENDLESS)
    ended, pid = break_in_step_2(running, lambda: running.ranks()[1], signal.SIGKILL)
    assert ended.code == 1
    assert ended.message.startswith("rank 1 (host ")
    assert f"pid {pid}) was ended by SIGKILL" in ended.message
    assert "Traceback" not in ended.stderr
    assert (ended.failure["rank"], ended.failure["pid"]) == (1, pid)


@pytest.mark.vllm
def test_a_killed_driver_takes_vllm_with_it(scene: Scene) -> None:
    running = scene.start("kill_rank_0", *ENDLESS)
    ended, pid = break_in_step_2(running, lambda: running.ranks()[0], signal.SIGKILL)
    assert ended.code == 1
    assert ended.message.startswith("rank 0 (host ")
    assert f"pid {pid}) was ended by SIGKILL" in ended.message
    assert (ended.failure["rank"], ended.failure["pid"]) == (0, pid)


@pytest.mark.vllm
def test_a_killed_vllm_is_named_with_its_log(scene: Scene) -> None:
    running = scene.start("kill_vllm", *ENDLESS)
    ended, pid = break_in_step_2(running, running.engine, signal.SIGKILL)
    assert ended.code == 1
    assert ended.message.startswith("rank 0 (host ")
    assert f": the vLLM engine (pid {pid}) was killed by SIGKILL " in ended.message  # as it generated, or before it could
    assert "logs/engine.log" in ended.message
    assert ended.failure["rank"] == 0


OWN_RANK = ("rollout.own_ranks=true", "actor.parallel={pp: 2}")


def test_a_killed_rank_that_only_generates_is_named(scene: Scene) -> None:
    running = scene.start("kill_engine_rank", *HF, *ENDLESS, *OWN_RANK)
    ended, pid = break_in_step_2(running, lambda: running.ranks()[2], signal.SIGKILL)
    assert ended.code == 1
    assert ended.message.startswith("rank 2 (host ")
    assert f"pid {pid}) was ended by SIGKILL" in ended.message
    assert (ended.failure["rank"], ended.failure["pid"]) == (2, pid)


WAITS = """
import time
from pathlib import Path


def waits_at_step_2(prompt, response, answer, row, calls=[]):
    calls.append(prompt)
    if len(calls) > 8:
        Path(__file__).with_suffix(".waiting").touch()
        time.sleep(1000)
    return 0.5
"""


@pytest.mark.vllm
@pytest.mark.long
def test_a_vllm_that_is_killed_while_it_is_idle_on_another_rank_is_named(scene: Scene) -> None:
    """Nobody asks it for anything: rank 0 waits for a reward."""
    (scene.folder / "waits.py").write_text(WAITS)
    waits = ("reward.function=waits.py:waits_at_step_2", "reward.timeout_s=1000", "data.validation=null")
    running = scene.start("kill_idle_vllm", *ENDLESS, *OWN_RANK, *waits, "trainer.batch_size=8")

    def engine() -> psutil.Process | None:
        running.wait_for((scene.folder / "waits.waiting").exists, "second step's reward")
        return running.engine()

    ended, pid = break_in_step_2(running, engine, signal.SIGKILL)
    assert ended.code == 1
    assert ended.message.startswith("rank 2 (host ")
    assert f"cannot go on in idle: the vLLM engine (pid {pid}) was killed by SIGKILL after generate; its log " in ended.message
    assert ended.failure["rank"] == 2


@pytest.mark.vllm
def test_sigterm_during_the_start_ends_the_ranks_and_vllm(scene: Scene) -> None:
    running = scene.start("sigterm", *ENDLESS)
    try:
        running.wait_for(lambda: len(running.ranks()) == 2 and running.engine(), "two ranks and an engine")
        time.sleep(2)  # vLLM imports, the ranks build their models
        send(running.process, signal.SIGTERM)
        ended = running.ended(WATCHDOG_S)
    finally:
        running.kill()
    assert ended.code == 128 + signal.SIGTERM
    assert ended.message == "the run was ended by SIGTERM"
    assert ended.failure["rank"] is None
    assert not (ended.run_dir / "metrics.jsonl").exists()


def test_ctrl_c_ends_the_run_and_keeps_the_metrics_of_every_step(scene: Scene) -> None:
    running = scene.start("sigint", *HF, *ENDLESS)
    ended, _ = break_in_step_2(running, lambda: psutil.Process(running.process.pid), signal.SIGINT)
    assert ended.code == 130
    assert ended.message == "the run was ended by SIGINT"
    assert "Traceback" not in ended.stderr
    steps = ended.column("step")
    assert steps == list(range(1, len(steps) + 1))
    assert len(list((ended.run_dir / "rollouts").glob("step_*.jsonl"))) in (len(steps), len(steps) + 1)


def test_a_bad_line_ends_all_ranks_before_the_models_are_built(scene: Scene) -> None:
    (scene.folder / "broken.jsonl").write_text('{"prompt": "1"}\n{"prompt": "2"}\n{"prompt":\n')
    ended = scene.run("bad_line", *HF, "data.train=broken.jsonl", expect=2)
    assert ended.stderr.splitlines() == [ended.message]
    assert ended.message.startswith("broken.jsonl:3: not valid JSON (")
    assert (ended.failure["rank"], ended.failure["phase"]) == (0, "load data")
    assert ended.stdout == ""


def test_a_reward_that_raises_at_step_2_is_the_message(scene: Scene) -> None:
    ended = scene.run(
        "reward_raises",
        *HF,
        "trainer.batch_size=16",
        "trainer.steps=3",
        "trainer.validate_every=0",
        "data.validation=null",
        "reward.function=reward.py:fails_at_step_2",
        expect=1,
    )
    assert (
        "reward.function='reward.py:fails_at_step_2' raised ZeroDivisionError: no score for you (reward.py line " in ended.message
    )
    assert " for step 2 sample 0 (row " in ended.message
    assert ended.message.startswith("rank 0 (host ")
    assert ended.failure["rank"] == 0
    assert ended.column("step") == [1]


NO_VALIDATION = ("trainer.validate_every=0", "data.validation=null", "trainer.save_every=0")


def test_a_reward_that_hangs_is_the_message(scene: Scene) -> None:
    hangs = ("reward.function=reward.py:hangs_at_step_2", "reward.timeout_s=0.5")
    ended = scene.run("reward_hangs", *HF, *NO_VALIDATION, "trainer.steps=3", *hangs, expect=1)
    assert ended.message.startswith("rank 0 (host ")
    assert (
        "reward.function='reward.py:hangs_at_step_2' took longer than reward.timeout_s=0.5 for step 2 sample 0" in ended.message
    )
    assert ended.column("step") == [1]


def test_samples_whose_reward_hangs_are_skipped_and_counted(scene: Scene) -> None:
    parts = "[{function: reward.py:share_of_even_digits}, {function: reward.py:hangs_for_a_third, weight: 0.5, name: length}]"
    policy = ("reward.on_error=skip_sample", "reward.timeout_s=0.5", "reward.workers=2")
    policy += ("reward.function=exact_match", f"reward.parts={parts}")  # the scene's config has a function
    ended = scene.run("reward_skips", *HF, *NO_VALIDATION, "trainer.steps=2", *policy)
    named = {"reward/part/share_of_even_digits", "reward/part/length"}
    for step, metrics in enumerate(ended.metrics, start=1):
        rows = ended.rollouts(step)
        kept = [row for row in rows if not row["skipped"]]
        assert [row["skipped"] for row in rows] == [int(row["answer"]) % 3 == 0 for row in rows]
        assert 0 < len(kept) < 8
        assert metrics["reward/skipped"] == metrics["reward/failed"] == 8 - len(kept)
        for row in kept:
            of = row["reward_parts"]
            assert of["length"] == len(row["response"])
            assert row["reward"] == pytest.approx(of["share_of_even_digits"] + 0.5 * of["length"])
        assert all(row["reward"] is None and row["reward_parts"]["length"] is None for row in rows if row["skipped"])
        for key, values in {
            "reward/mean": [row["reward"] for row in kept],
            "reward/part/length": [row["reward_parts"]["length"] for row in kept],
        }.items():
            assert metrics[key] == pytest.approx(sum(values) / len(kept))
        assert metrics.keys() - METRICS.keys() == {"step"} | named
        assert sum(f"for step {step} sample" in line for line in ended.stderr.splitlines()) <= 3
    assert "scoring" in (ended.run_dir / "logs" / "reward.log").read_text()
    assert "scoring" not in ended.stderr


def test_a_killed_driver_takes_its_reward_workers_with_it(scene: Scene) -> None:
    hangs = ("reward.function=reward.py:hangs_at_step_2", "reward.timeout_s=1000")
    running = scene.start("kill_with_reward", *HF, *ENDLESS, "data.validation=null", *hangs)
    ended, pid = break_in_step_2(running, lambda: running.ranks()[0], signal.SIGKILL)
    assert ended.code == 1
    assert f"pid {pid}) was ended by SIGKILL" in ended.message


def test_a_reward_file_that_cannot_be_imported_ends_the_run_before_the_models_are_built(scene: Scene) -> None:
    (scene.folder / "broken.py").write_text("import no_such_package\n\ndef score(*_): return 1\n")
    ended = scene.run("reward_broken", *HF, "reward.function=broken.py:score", expect=2)
    assert ended.message == (
        "reward.function='broken.py:score': importing the file raised ModuleNotFoundError: No module named 'no_such_package'; "
        "mend 'broken.py'"
    )
    assert (ended.failure["rank"], ended.failure["phase"]) == (0, "load rewards")
    assert ended.stdout == ""


@pytest.mark.long
def test_a_run_that_cannot_learn_anything_ends_and_says_so(scene: Scene) -> None:
    """Every response scores alike, so dynamic sampling leaves no token that counts."""
    options = ("rollout.engine=hf", "actor.parallel={pp: 1, vpp: 1}", "reward.function=reward.py:always_the_same", "rollout.n=2")
    options += ("algorithm.dynamic_sampling_rounds=1", "trainer={batch_size: 4, max_skips: 2, validate_every: 0, save_every: 0}")
    run = scene.run("hopeless", *options, "actor.mini_batch_size=4", "critic.mini_batch_size=4", "data.validation=null", expect=1)
    assert (
        "critic: 2 optimizer steps in a row were skipped (trainer.max_skips), the last for this: no valid token." in run.message
    )
