"""What is a checkpoint folder? `checkpoint.json` beside Megatron's files and `hf/`; `read_manifest` refuses all others. No torch.

step_000100/actor/
  checkpoint.json      this file's `Manifest`: what the folder holds, and the size of each of its files
  __0_0.distcp ..      shards, `.metadata`, `common.pt`, `metadata.json`: megatron.core.dist_checkpointing's format torch_dist
  hf/                  config.json, tokenizer and generation config: all of a Hugging Face folder but its weights
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megappo.errors import UserError
from megappo.models.shape import CHECKPOINT_FILE, Head, checkpoint_folder

FORMAT = 1
HF = "hf"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint folder holds.

    step: trainer step after which it was saved; None for an imported model.
    dtype, other_dtypes: dtype in which each Hugging Face tensor is exported by default; `other_dtypes` names the exceptions.
    layout: the degrees it was saved under; any other can load it. files: path -> bytes of every other file of the folder.
    """

    head: Head
    step: int | None
    dtype: str
    layout: dict[str, Any]
    versions: dict[str, str]
    files: dict[str, int]
    other_dtypes: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    def dtype_of(self, hf_name: str) -> str:
        return self.other_dtypes.get(hf_name, self.dtype)


def compact_dtypes(dtypes: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """(the dtype that most tensors have, the others by name)."""
    names = list(dtypes.values())
    most = max(sorted(set(names)), key=names.count)
    return most, {name: dtype for name, dtype in dtypes.items() if dtype != most}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file of a draft; `manifest.files` is what lies there by then (`file_sizes`)."""
    (folder / CHECKPOINT_FILE).write_text(json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2) + "\n", encoding="utf-8")


def file_sizes(folder: Path) -> dict[str, int]:
    """Path inside the folder -> bytes, of every file but `checkpoint.json`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files if path.name != CHECKPOINT_FILE}


def saved_step(path: str | Path) -> int:
    """The trainer step whose weights a model path holds: 0 for a Hugging Face folder and for an imported model."""
    return 0 if checkpoint_folder(path) is None else read_manifest(path)[1].step or 0


def read_manifest(path: str | Path) -> tuple[Path, Manifest]:
    """(the checkpoint folder that a path stands for, its manifest). Raises UserError for a folder that is none, or not whole."""
    folder = checkpoint_folder(path)
    if folder is None:
        why = "is not a folder" if not Path(path).is_dir() else f"has no {CHECKPOINT_FILE}, so it is no complete checkpoint"
        raise UserError(f"{str(path)!r} {why}; give a folder that `megappo import` or trainer.save_every has written")
    try:
        found = json.loads((folder / CHECKPOINT_FILE).read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise UserError(
                f"{str(folder)!r} has checkpoint format {found['format']}, this version reads {FORMAT}; use the megappo that "
                f"wrote it ({found['versions']['megappo']})"
            )
        manifest = Manifest(**found)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder / CHECKPOINT_FILE} cannot be read ({error!r}); copy the checkpoint again") from None
    sizes = file_sizes(folder)
    for name, size in manifest.files.items():
        if sizes.get(name) != size:
            has = f"{sizes[name]} bytes" if name in sizes else "no such file"
            raise UserError(
                f"{str(folder)!r} is not whole: {name} must have {size} bytes, there is {has}; copy the checkpoint again"
            )
    return folder, manifest


def require_replaceable(folder: str | Path) -> None:
    """Raise UserError unless a checkpoint may be written there: nothing, an empty folder, or an older checkpoint."""
    folder = Path(folder)
    if folder.is_dir() and ((folder / CHECKPOINT_FILE).is_file() or not any(folder.iterdir())):
        return
    if folder.exists():
        raise UserError(f"{str(folder)!r} exists and is no checkpoint, so it is not overwritten; give another name or remove it")
