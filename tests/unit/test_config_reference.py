"""Are the generated pages of the docs current, and is every key on them?"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from megappo.config.convert import all_keys

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["config_reference", "metrics_reference"])
def test_a_generated_page_is_current(name: str) -> None:
    module = script(name)
    assert module.TARGET.read_text(encoding="utf-8") == module.reference(), f"run scripts/{name}.py"


def test_every_key_has_a_row_with_its_documentation() -> None:
    page = script("config_reference").reference()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    sections = {key.rpartition(".")[0] for key in all_keys()}
    for key in all_keys():
        if key.startswith(("critic.parallel", "reference.parallel")):
            assert key.split(".parallel")[0] + ".parallel.*" in rows  # the same keys as actor.parallel
        elif key not in sections:
            assert rows[key].count(" | ") >= 3
            assert len(rows[key].split(" | ")[-1]) > 5
