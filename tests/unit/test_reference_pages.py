"""Are the generated pages of the docs current, and is every key on them?"""

from __future__ import annotations

import pytest

from megappo.config.convert import all_keys
from scripts.reference_pages import DOCS, PAGES, config_page


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


def test_every_key_has_a_row_with_its_documentation() -> None:
    rows = {line.split("`")[1]: line for line in config_page().splitlines() if line.startswith("| `")}
    sections = {key.rpartition(".")[0] for key in all_keys()}
    for key in all_keys():
        if key.startswith(("critic.parallel", "reference.parallel")):
            assert key.split(".parallel")[0] + ".parallel.*" in rows  # the same keys as actor.parallel
        elif key not in sections:
            assert rows[key].count(" | ") >= 3
            assert len(rows[key].split(" | ")[-1]) > 5
