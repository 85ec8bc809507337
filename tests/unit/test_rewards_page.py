"""Does what docs/rewards.md shows work as it stands there? Its files are written, its configs loaded, its script run."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megappo.config.check_files import reward_problems
from megappo.config.load import load_config
from megappo.rewards.functions import BUILTIN
from megappo.rewards.score import Scorer, ScoreRequest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
CONFIGS = [text for language, text in BLOCKS if language == "yaml"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with the files of the page: each python block says its name in its first line."""
    for language, text in BLOCKS:
        if language == "python":
            (tmp_path / text.split()[1]).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_page_has_the_examples_that_this_test_is_about() -> None:
    assert {language for language, _ in BLOCKS} == {"yaml", "python"}
    assert len(CONFIGS) == 5
    assert all(f"| `{name}` |" in PAGE for name in BUILTIN)


@pytest.mark.parametrize("text", CONFIGS)
def test_every_config_scores(here: Path, text: str) -> None:
    (here / "config.yaml").write_text(f"model: {{path: m}}\ndata: {{train: t.jsonl}}\n{text}")
    config = load_config("config.yaml")
    assert list(reward_problems(config, "train")) == []
    with Scorer(config.reward) as scorer:
        scores = scorer.score([ScoreRequest("one", "2 + 2 =", "4", "4", {}), ScoreRequest("two", "2 + 2 =", "no", "4", {})])
    assert not any(scores.failed)
    assert scores.values[0] >= 1.0 > scores.values[1]
    if config.reward.parts:
        assert {name: values[0] for name, values in scores.parts.items()} == {"last_number": 1, "brevity": 0.995, "closeness": 1}
        assert math.isclose(scores.values[0], 1 + 0.2 * 0.995)


def test_the_script_prints_what_it_says(here: Path) -> None:
    done = subprocess.run([sys.executable, "try_it.py"], capture_output=True, text=True, check=True)
    assert f"# {done.stdout.strip()}\n" in (here / "try_it.py").read_text()
