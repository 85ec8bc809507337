"""Where do the files of a run go? `open_run_folder`: a new folder with the resolved config; an older one is moved aside."""

from __future__ import annotations

from pathlib import Path

from megappo.config.load import dump_config
from megappo.config.schema import Config


def open_run_folder(folder: Path, config: Config) -> Path:
    """Make the folder. One that is there already keeps its content under the next free number (`demo.1`)."""
    if (folder / "config.resolved.yaml").exists():
        number = 1
        while (older := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(older)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.resolved.yaml").write_text(dump_config(config), encoding="utf-8")
    return folder
