"""Do rewards score what they should, and is one that fails never a silent zero?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megappo.config.schema import DataConfig, RewardConfig
from megappo.data.tasks import task_rows
from megappo.errors import RunFailed, UserError
from megappo.rewards.functions import BUILTIN, RewardFunction, exact_match, last_number, reasoning_gym
from megappo.rewards.load import load_reward
from megappo.rewards.score import ScoreRequest, Scores, score_all


def requests(*responses: str, answer: str | None = "1") -> list[ScoreRequest]:
    return [ScoreRequest(f"sample {i}", "p", response, answer, {}) for i, response in enumerate(responses)]


@pytest.mark.parametrize(("response", "score"), [("042", 1.0), (" 042\n", 1.0), ("42", 0.0), ("042 042", 0.0), ("", 0.0)])
def test_exact_match_wants_the_whole_response(response: str, score: float) -> None:
    assert exact_match("p", response, "042", {}) == score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("12 + 7 = 19", "19", 1.0),
        ("19 is 12 + 7", "19", 0.0),
        ("The answer is 19.", "19", 1.0),
        ("12 + 7 = 019", "19", 1.0),
        ("it is 1,234.50", "1234.5", 1.0),
        ("it is -3", "-3", 1.0),
        ("5-3", "-3", 0.0),
        ("5 - 3", "3", 1.0),
        ("none", "19", 0.0),
    ],
)
def test_last_number_compares_the_last_number(response: str, answer: str, score: float) -> None:
    assert last_number("p", response, answer, {}) == score


def test_a_row_without_an_answer_is_a_failed_reward_not_a_zero() -> None:
    for function in (exact_match, last_number):
        with pytest.raises(RunFailed, match="the row has no answer"):
            score_all(function, requests("1", answer=None), RewardConfig())


def fails_with(value: Any) -> RewardFunction:
    def reward(prompt: str, response: str, answer: str | None, row: Mapping[str, Any]) -> Any:
        if response != "bad":
            return 1
        if isinstance(value, Exception):
            raise value
        return value

    return reward


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"returned None \(NoneType\), not a number, for sample 1"),
        (math.nan, "returned nan for sample 1"),
        (math.inf, "returned inf for sample 1"),
        ("1", r"returned '1' \(str\), not a number"),
        ([1.0], r"returned \[1\.0\] \(list\), not a number"),
        (KeyError("x"), "raised KeyError: 'x' for sample 1"),
    ],
)
def test_one_failed_score_of_three_follows_the_policy(value: Any, message: str) -> None:
    three = requests("good", "bad", "good")
    with pytest.raises(RunFailed, match=message):
        score_all(fails_with(value), three, RewardConfig(on_error="fail"))
    policy = RewardConfig(on_error="score", error_score=-0.5)
    assert score_all(fails_with(value), three, policy) == Scores((1.0, -0.5, 1.0), 1)


def test_a_failed_score_is_logged_with_the_sample_and_the_cause(caplog: pytest.LogCaptureFixture) -> None:
    score_all(fails_with(KeyError("x")), requests("bad"), RewardConfig(function="mine", on_error="score"))
    assert "reward.function='mine' raised KeyError: 'x' for sample 0 (response 'bad'); scored 0" in caplog.text


def test_numpy_and_bool_scores_are_numbers() -> None:
    import numpy as np

    for value in (np.float32(0.5), np.int64(1), True):
        (score,) = score_all(fails_with(value), requests("bad"), RewardConfig()).values
        assert type(score) is float and score == float(value)


def test_a_user_function_is_loaded_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def length(prompt, response, answer, row):\n    return len(response) / row['scale']\n")
    reward = load_reward(f"{file}:length")
    assert reward("p", "abc", None, {"scale": 2}) == 1.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_mach", "did you mean exact_match"),
        ("rewards.py", "neither a built-in reward nor path/to/file.py:function"),
        ("{folder}/absent.py:score", r"the file '.*absent\.py' does not exist"),
        ("{folder}/mine.py:absent", "has no function 'absent'"),
        ("{folder}/mine.py:NUMBER", "NUMBER"),
        ("{folder}/broken.py:score", "importing the file raised ZeroDivisionError"),
    ],
)
def test_a_reward_that_cannot_be_found_is_refused_in_one_line(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "mine.py").write_text("NUMBER = 7\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(UserError, match=message) as caught:
        load_reward(name.format(folder=tmp_path))
    assert "\n" not in str(caught.value)


def test_built_in_rewards_go_by_their_names() -> None:
    assert set(BUILTIN) == {"exact_match", "last_number", "reasoning_gym"}
    assert all(load_reward(name) is function for name, function in BUILTIN.items())


TASK = DataConfig(train="reasoning_gym:chain_sum", task_size=3, task_options={"min_terms": 2, "max_terms": 2})


def test_task_rows_are_scored_by_the_tasks_own_scorer() -> None:
    pytest.importorskip("reasoning_gym")
    found = list(task_rows(TASK.train, TASK, seed=1))
    assert [where for where, _ in found] == [f"reasoning_gym:chain_sum[{i}]" for i in range(3)]
    for _, row in found:
        assert reasoning_gym(row["prompt"], row["answer"], row["answer"], row) == 1.0
        assert reasoning_gym(row["prompt"], "no number", row["answer"], row) < 1.0


def test_task_rows_depend_on_the_seed_alone() -> None:
    pytest.importorskip("reasoning_gym")

    def prompts(seed: int) -> list[str]:
        return [row["prompt"] for _, row in task_rows(TASK.train, TASK, seed)]

    assert prompts(1) == prompts(1) != prompts(2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (replace(TASK, train="reasoning_gym:chainsum"), "did you mean reasoning_gym:chain_sum"),
        (replace(TASK, task_options={"min_term": 2}), "data.task_options=.*refused by the task"),
        (replace(TASK, task_options={"min_digits": -1}), "data.task_options=.*min_digits must be positive"),
    ],
)
def test_an_unknown_task_or_option_is_refused(data: DataConfig, message: str) -> None:
    pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match=message):
        list(task_rows(data.train, data, seed=1))


def test_a_missing_reasoning_gym_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install 'megappo\[tasks\]'"):
        list(task_rows(TASK.train, TASK, seed=1))


def test_reasoning_gym_reward_on_rows_of_a_file_says_where_it_belongs() -> None:
    with pytest.raises(RunFailed, match=r"scores only rows of data\.train=reasoning_gym:TASK"):
        score_all(reasoning_gym, requests("1"), RewardConfig(function="reasoning_gym"))
