"""Are the last lines of a run what scripts look for?"""

from __future__ import annotations

from megappo.observe.summary import summary_lines


def test_the_mean_reward_goes_from_the_first_to_the_last_five_steps() -> None:
    rewards = [0.1, 0.1, 0.2, 0.2, 0.2, *[9.0] * 10, 0.4, 0.4, 0.4, 0.5, 0.55]
    assert summary_lines(rewards) == ["mean reward: 0.16 -> 0.45"]


def test_the_held_out_accuracy_is_the_last_line() -> None:
    assert summary_lines([0.0, 1.0], 0.414, 0.926) == ["mean reward: 0.00 -> 1.00", "held-out accuracy: 0.41 -> 0.93"]


def test_short_runs_compare_their_halves() -> None:
    assert summary_lines([1.0, 2.0, 3.0]) == ["mean reward: 1.00 -> 3.00"]
    assert summary_lines([1.0, 2.0, 3.0, 5.0]) == ["mean reward: 1.50 -> 4.00"]
    assert summary_lines([0.5]) == ["mean reward: 0.50 -> 0.50"]
    assert summary_lines([]) == []
