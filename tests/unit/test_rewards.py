"""Do the built-in rewards score what they should, and is a function found by its name? (Failures: test_scorer.py.)"""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megappo.config.schema_learning import DataConfig, RewardConfig, RewardPart
from megappo.data.tasks import task_rows
from megappo.errors import UserError
from megappo.rewards.functions import BUILTIN, exact_match, last_number, math, reasoning_gym
from megappo.rewards.load import load_reward
from megappo.rewards.parts import reward_parts


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


def test_last_number_takes_what_follows_the_mark_of_a_gsm8k_answer() -> None:
    answer = "Half of 48 is 24. 48 + 24 = 72\n#### 72"
    assert last_number("p", "so 72", answer, {}) == 1.0
    assert last_number("p", "so 24", answer, {}) == 0.0


@pytest.mark.parametrize(
    ("answer", "response", "score"),
    [
        (r"\frac{1}{2}", "0.5", 1.0),
        (r"\frac{1}{2}", "so it is 1/2.", 1.0),
        (r"\frac{1}{2}", r"thus \boxed{\frac{2}{4}}, a half", 1.0),
        (r"\frac{1}{2}", r"\boxed{0.6}", 0.0),
        ("0.5", r"$\frac12$", 1.0),
        ("1/3", "0.33", 0.0),
        (r"$\sqrt{18}$", r"\boxed{3\sqrt{2}}", 1.0),
        (r"\boxed{2x+1}", "$1 + 2x$", 1.0),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
        (r"\{1,2\}", r"\boxed{\{1,3\}}", 0.0),
        ("(1,2)", r"\boxed{(2,1)}", 0.0),
        ("(1,2]", r"\boxed{(1,2]}", 1.0),
        ("(1,2]", r"\boxed{[1,2]}", 0.0),
        ("1,234", "it is 1234", 1.0),
        ("It is 3 x 4 = 12\n#### 12", r"\boxed{12}", 1.0),
        ("12", "We get 3, then 12", 1.0),
        ("12", "12, then 3", 0.0),
        ("6", r"\boxed{5}, no: \boxed{6}", 1.0),
        ("5", r"\boxed{5}, no: \boxed{6}", 0.0),
        ("5", "", 0.0),
        ("5", "I do not know ???", 0.0),
        ("5", r"\boxed{", 0.0),
        ("5", r"\boxed{\frac{1}{", 0.0),
    ],
)
def test_math_compares_what_the_answers_mean(answer: str, response: str, score: float) -> None:
    pytest.importorskip("math_verify")
    assert math("p", response, answer, {}) == score


@pytest.mark.parametrize("answer", ["", "{", r"\boxed{}"])
def test_an_answer_that_is_no_mathematics_is_an_error_of_the_data(answer: str) -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="is no mathematics that math-verify can read"):
        math("p", "5", answer, {})


def test_a_response_that_takes_for_ever_to_compare_scores_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.setattr("megappo.rewards.functions._COMPARING_S", 1)
    with caplog.at_level(logging.WARNING):
        assert math("p", r"\boxed{9^{9^{9^{9}}}}", "1", {}) == 0.0
    assert "Timeout during comparison" in caplog.text


@pytest.mark.parametrize("function", [exact_match, last_number, math])
def test_a_row_without_an_answer_raises(function) -> None:
    pytest.importorskip("math_verify")
    with pytest.raises(ValueError, match="the row has no answer"):
        function("p", "1", None, {})


def test_a_user_function_is_loaded_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def length(prompt, response, answer, row):\n    return len(response) / row['scale']\n")
    reward = load_reward(f"{file}:length")
    assert reward("p", "abc", None, {"scale": 2}) == 1.5


def test_two_functions_of_one_file_share_its_state_and_find_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "neighbour_of_mine.py").write_text("FIVE = 5\n")
    file = tmp_path / "state.py"
    file.write_text(
        "import neighbour_of_mine\nseen = []\ndef one(*_): seen.append(1)\n"
        "def two(*_): return len(seen) + neighbour_of_mine.FIVE\n"
    )
    one, two = load_reward(f"{file}:one"), load_reward(f"{file}:two")
    one("p", "r", None, {})
    assert two("p", "r", None, {}) == 6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact_mach", "neither a built-in reward nor path/to/file.py:function; use one of exact_match, "),
        ("rewards.py", "neither a built-in reward nor path/to/file.py:function"),
        ("{folder}/absent.py:score", r"the file '.*absent\.py' does not exist"),
        ("{folder}/mine.py:absent", "has no function 'absent'"),
        ("{folder}/mine.py:NUMBER", "NUMBER"),
        ("{folder}/broken.py:score", "importing the file raised ZeroDivisionError"),
        ("{folder}/exits.py:score", "importing the file raised SystemExit: 3"),
    ],
)
def test_a_reward_that_cannot_be_found_is_refused_in_one_line(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "mine.py").write_text("NUMBER = 7\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(UserError, match=message) as caught:
        load_reward(name.format(folder=tmp_path))
    assert "\n" not in str(caught.value)


def test_built_in_rewards_go_by_their_names() -> None:
    assert set(BUILTIN) == {"exact_match", "last_number", "math", "reasoning_gym"}
    for name, package in (
        ("exact_match", None),
        ("last_number", None),
        ("math", "math_verify"),
        ("reasoning_gym", "reasoning_gym"),
    ):
        if package is not None:
            pytest.importorskip(package)
        assert load_reward(name) is BUILTIN[name]


def test_a_missing_math_verify_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=r"math_verify cannot be imported .*; pip install 'megappo\[tasks\]'"):
        load_reward("math")


def test_parts_have_the_names_of_their_functions_unless_given_others() -> None:
    (only,) = reward_parts(RewardConfig(function="some/mine.py:score"))
    assert (only.name, only.weight, only.shown) == ("score", 1.0, "reward.function='some/mine.py:score'")
    first, second = reward_parts(RewardConfig(parts=(RewardPart("last_number", 0.5), RewardPart("a.py:score", name="style"))))
    assert (first.name, first.weight, first.in_driver) == ("last_number", 0.5, True)
    assert (second.name, second.in_driver, second.shown) == ("style", False, "reward.parts[1].function='a.py:score'")


def test_a_worker_imports_nothing_heavy() -> None:
    code = (
        "import sys, megappo.rewards.worker; print(sorted({'torch', 'numpy', 'sympy', 'datasets', 'pyarrow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


TASK = DataConfig(train="reasoning_gym:chain_sum", task_size=3, task_options={"min_terms": 2, "max_terms": 2})


def test_task_rows_are_scored_by_the_tasks_own_scorer() -> None:
    pytest.importorskip("reasoning_gym")
    found = list(task_rows(TASK.train, TASK, seed=1))
    for _, _, row in found:
        assert reasoning_gym(row["prompt"], row["answer"], row["answer"], row) == 1.0
        assert reasoning_gym(row["prompt"], "no number", row["answer"], row) < 1.0


def test_task_rows_depend_on_the_seed_alone() -> None:
    pytest.importorskip("reasoning_gym")

    def prompts(seed: int) -> list[str]:
        return [row["prompt"] for _, _, row in task_rows(TASK.train, TASK, seed)]

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
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install 'megappo\[tasks\]'"):
        list(task_rows(TASK.train, TASK, seed=1))


def test_reasoning_gym_reward_on_rows_of_a_file_says_where_it_belongs() -> None:
    with pytest.raises(ValueError, match=r"scores only rows of data\.train=reasoning_gym:TASK"):
        reasoning_gym("p", "1", "1", {})
