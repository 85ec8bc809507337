"""How does a folder appear under its name only once it is complete? As a draft beside it that is renamed. No torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from megappo.errors import RunFailed


def draft_of(folder: str | Path) -> Path:
    """Where a folder is written before it gets its name: hidden, beside it, so that the rename is one step."""
    folder = Path(folder)
    return folder.with_name(f".{folder.name}.writing")


def start_draft(folder: str | Path, num_bytes: int = 0) -> Path:
    """An empty draft for the folder. What a broken-off write of the same folder left is removed.

    Raises RunFailed unless the file system has room for `num_bytes`."""
    draft = draft_of(folder)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    free = shutil.disk_usage(draft).free
    if free < num_bytes:
        draft.rmdir()
        raise RunFailed(f"{folder} takes {num_bytes} bytes and {free} are free on its disk; nothing was written, free some space")
    return draft


def move_into_place(draft: Path, folder: str | Path) -> None:
    """Give the draft its name once all of it is on the disk. An older folder of that name goes only then."""
    folder = Path(folder)
    for path in (*draft.rglob("*"), draft):
        _sync(path)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """A small file that holds the old text or the new one, never a part."""
    draft = draft_of(path)
    draft.write_text(text, encoding="utf-8")
    _sync(draft)
    os.replace(draft, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
