"""Is a reward that fails never a silent zero? The policies of `reward.on_error`, and the sum of several rewards."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megappo.config.schema_learning import DataConfig, RewardConfig, RewardPart
from megappo.data.tasks import task_rows
from megappo.errors import RunFailed, UserError
from megappo.rewards.call import call_reward
from megappo.rewards.score import Scorer, ScoreRequest, Scores

# Each of these responses makes the reward below fail in a way of its own; what the message then says.
FAILURES = {
    "None": r"returned None \(NoneType\), not a number, for sample 1",
    "float('nan')": "returned nan for sample 1",
    "float('inf')": "returned inf for sample 1",
    "'1'": r"returned '1' \(str\), not a number, for sample 1",
    "[1.0]": r"returned \[1\.0\] \(list\), not a number",  # one too many: a list of scores, not a score
    "{}['x']": r"raised KeyError: 'x' \(<string> line 1\) for sample 1",
    "10 ** 400": "raised OverflowError",
    "sys.exit(3)": "raised SystemExit: 3",
    "lambda: 1": r"returned <function <lambda> at .*> \(function\), not a number",  # what cannot be pickled
    "os._exit(7)": "ended its process with exit code 7 for sample 1",
    "os.kill(os.getpid(), 11)": "ended its process with SIGSEGV for sample 1",
    "time.sleep(1000)": r"took longer than reward\.timeout_s=0\.5 for sample 1",
}
REWARD = """
import os, sys, time

def evaluated(prompt, response, answer, row):
    return eval(response)

def length(prompt, response, answer, row):
    return len(response)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(REWARD)
    return path


@pytest.fixture(scope="module")
def scorer_of(file: Path) -> Iterator[Callable[..., Scorer]]:
    """A scorer of the file's functions; one for each policy is kept, since each has a process."""
    kept: dict[Any, Scorer] = {}

    def make(on_error: str, error_score: float = 0.0) -> Scorer:
        if (on_error, error_score) not in kept:
            config = RewardConfig(f"{file}:evaluated", on_error=on_error, error_score=error_score, timeout_s=0.5)  # type: ignore[arg-type]
            kept[on_error, error_score] = Scorer(config)
        return kept[on_error, error_score]

    yield make
    for scorer in kept.values():
        scorer.close()


def requests(*responses: str, answer: str | None = "1") -> list[ScoreRequest]:
    return [ScoreRequest(f"sample {i}", "p", response, answer, {}) for i, response in enumerate(responses)]


def scores(*values: float, failed: tuple[int, ...] = (), skipped: tuple[int, ...] = ()) -> Scores:
    places = range(len(values))
    return Scores(values, tuple(i in failed for i in places), tuple(i in skipped for i in places), {})


@pytest.mark.parametrize("response", FAILURES)
def test_one_failed_reward_of_three_follows_the_policy(scorer_of: Callable[..., Scorer], response: str) -> None:
    three = requests("0.25", response, "True")
    with pytest.raises(RunFailed, match=FAILURES[response]) as caught:
        scorer_of("fail").score(three)
    assert "\n" not in str(caught.value)
    assert scorer_of("score", -0.5).score(three) == scores(0.25, -0.5, 1.0, failed=(1,))
    assert scorer_of("skip_sample").score(three) == scores(0.25, 0.0, 1.0, failed=(1,), skipped=(1,))


def test_the_same_scorer_goes_on_after_a_failed_batch(scorer_of: Callable[..., Scorer]) -> None:
    with pytest.raises(RunFailed):
        scorer_of("fail").score(requests("1", "1 / 0", "2"))
    assert scorer_of("fail").score(requests("1", "2")).values == (1.0, 2.0)


def test_a_batch_of_which_nothing_is_left_is_refused(scorer_of: Callable[..., Scorer]) -> None:
    with pytest.raises(RunFailed, match=r"skip_sample leaves none of 2 samples; the first: .* returned None .* for sample 0"):
        scorer_of("skip_sample").score(requests("None", "None"))
    assert scorer_of("score").score(requests("None", "None")) == scores(0, 0, failed=(0, 1))


def test_built_in_rewards_of_the_driver_follow_the_policy_too() -> None:
    missing = [*requests("1"), *requests("1", answer=None)]
    with pytest.raises(
        RunFailed, match=r"reward\.function='exact_match' raised ValueError: the row has no answer .*for sample 0"
    ):
        Scorer(RewardConfig()).score(missing)
    found = Scorer(RewardConfig("last_number", on_error="skip_sample")).score(missing)
    assert found == scores(1.0, 0.0, failed=(1,), skipped=(1,))


def test_a_flood_of_failures_is_three_lines_and_a_number(
    scorer_of: Callable[..., Scorer], caplog: pytest.LogCaptureFixture, file: Path
) -> None:
    with caplog.at_level(logging.WARNING, logger="megappo"):
        found = scorer_of("skip_sample").score(requests(*["None"] * 50, "1.0"))
    assert found.num_failed == 50
    assert caplog.messages[:3] == [
        f"reward.function='{file}:evaluated' returned None (NoneType), not a number, for sample {i} (response 'None'); skipped"
        for i in range(3)
    ]
    assert caplog.messages[3:] == ["the reward failed for 50 of 51 samples; 3 are shown"]


def test_messages_are_one_line_of_bounded_length(scorer_of: Callable[..., Scorer]) -> None:
    response = "raise_(" + repr("two\nlines " * 1000) + ")"
    with pytest.raises(RunFailed) as caught:
        scorer_of("fail").score(requests(response))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_math_and_reasoning_gym_score_in_a_worker() -> None:
    pytest.importorskip("math_verify")
    pytest.importorskip("reasoning_gym")
    data = DataConfig(train="reasoning_gym:chain_sum", task_size=2)
    rows = [row for _, _, row in task_rows("reasoning_gym:chain_sum", data, seed=1)]
    tasks = [ScoreRequest(f"row {i}", row["prompt"], row["answer"], row["answer"], row) for i, row in enumerate(rows)]
    with Scorer(RewardConfig(parts=(RewardPart("reasoning_gym"), RewardPart("math")))) as scorer:
        assert scorer.score(tasks).parts == {"reasoning_gym": (1.0, 1.0), "math": (1.0, 1.0)}
    with Scorer(RewardConfig("math", on_error="skip_sample")) as scorer:
        one_half = [ScoreRequest(str(i), "p", r"\boxed{\frac{1}{2}}", answer, {}) for i, answer in enumerate(["0.5", "0.6", "{"])]
        assert scorer.score(one_half) == scores(1.0, 0.0, 0.0, failed=(2,), skipped=(2,))


def test_numpy_and_bool_scores_are_numbers() -> None:
    import numpy as np

    for value in (np.float32(0.5), np.int64(1), True):
        number, problem = call_reward(lambda *_, value=value: value, requests("r")[0])
        assert (type(number), number, problem) == (float, float(value), None)


# -- several rewards ----------------------------------------------------------------------------------------------------------


def test_the_score_is_the_weighted_sum_of_its_parts(file: Path) -> None:
    parts = (RewardPart("last_number", 2.0), RewardPart(f"{file}:length", -0.5, "shortness"), RewardPart("exact_match", 0.0))
    with Scorer(RewardConfig(parts=parts)) as scorer:
        found = scorer.score(requests("so 1", "1", "2"))
    assert found.parts == {"last_number": (1.0, 1.0, 0.0), "shortness": (4.0, 1.0, 1.0), "exact_match": (0.0, 1.0, 0.0)}
    assert found.values == (0.0, 1.5, -0.5)
    assert found.part_means() == {"last_number": 2 / 3, "shortness": 2.0, "exact_match": 1 / 3}


def test_a_sample_with_one_failed_part_has_failed(file: Path) -> None:
    parts = (RewardPart("last_number"), RewardPart(f"{file}:evaluated"), RewardPart(f"{file}:length"))
    with Scorer(RewardConfig(parts=parts, on_error="score", error_score=-1.0)) as scorer:
        found = scorer.score(requests("1", "1 / 0"))
    assert found.values == (3.0, -1.0)
    assert found.failed == (False, True)
    assert found.parts["last_number"] == (1.0, 0.0)
    assert [math.isnan(found.parts[name][1]) for name in ("evaluated", "length")] == [True, True]
    assert found.part_means() == {"last_number": 1.0, "evaluated": 1.0, "length": 1.0}
    with (
        Scorer(RewardConfig(parts=parts)) as scorer,
        pytest.raises(RunFailed, match=r"reward\.parts\[1\]\.function='.*:evaluated'"),
    ):
        scorer.score(requests("1 / 0"))


def test_means_leave_skipped_samples_out() -> None:
    found = Scores((1.0, 0.0, 0.5), (False, True, False), (False, True, False), {"a": (2.0, math.nan, 4.0)})
    assert (found.mean(), found.part_means(), found.num_failed) == (0.75, {"a": 3.0}, 1)


# -- functions that cannot be loaded ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0", "importing the file raised ZeroDivisionError: division by zero; mend '.*mine.py'"),
        ("import os; os._exit(9)", "importing ended the process with exit code 9"),
        ("import time; time.sleep(1000)", "importing took longer than 2 s"),
        ("score = 7", "has, but not as a function, 'score'"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.setattr("megappo.rewards.pool.SHORTEST_LOADING_S", 2.0)
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=f"reward.function='{tmp_path}/mine.py:score': .*{message}") as caught:
        Scorer(RewardConfig(f"{tmp_path}/mine.py:score", timeout_s=0.5))
    assert "\n" not in str(caught.value)


def test_every_part_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1 / 0")
    (tmp_path / "b.py").write_text("{}['x']")
    with pytest.raises(UserError) as caught:
        Scorer(RewardConfig(parts=(RewardPart(f"{tmp_path}/a.py:f"), RewardPart(f"{tmp_path}/b.py:f", name="g"))))
    first, second = str(caught.value).splitlines()
    assert first.startswith("reward.parts[0].function=") and "ZeroDivisionError" in first
    assert second.startswith("reward.parts[1].function=") and "KeyError" in second
