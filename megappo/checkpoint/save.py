"""How does a model become a checkpoint folder? `save_model`; `save_step` for all models of a training step.

Every rank of the world calls these. A folder appears under its name only when it is complete; whatever goes wrong on one rank is
raised by all, and an older folder of that name is then still there.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from megappo import __version__
from megappo.checkpoint.format import HF, Manifest, compact_dtypes, file_sizes, write_manifest
from megappo.checkpoint.shards import CONTENT, sharded_tensors, write_shards
from megappo.checkpoint.source import ShardFiles, megatron_tensors, stored_name
from megappo.checkpoint.together import on_rank_0, together
from megappo.errors import RunFailed
from megappo.models.families import rules_in_order
from megappo.models.gpt import GPTChunk
from megappo.models.shape import LATEST, ModelShape
from megappo.parallel_state.groups import RoleGroups
from megappo.parallel_state.mcore_compat import complete_common_state
from megappo.pp_weights.folders import draft_of, move_into_place, start_draft, write_text
from megappo.pp_weights.hf_writer import carry_files, largest_dtype
from megappo.pp_weights.mapping import expected_hf_tensors
from megappo.pp_weights.verify import compare_names


@dataclass(frozen=True)
class Savable:
    """A model on the ranks, and what its folder gets beside the weights.

    hf_source: model path whose config, tokenizer and generation config go along.
    dtypes: Hugging Face name -> dtype of the default export; None: as the parameters are held."""

    chunks: Sequence[GPTChunk]
    groups: RoleGroups
    hf_source: str | Path
    dtypes: Mapping[str, torch.dtype] | None = None

    @property
    def num_bytes(self) -> int:
        shape: ModelShape = self.chunks[0].shape
        dtype: torch.dtype = self.chunks[0].config.params_dtype
        return shape.num_parameters * dtype.itemsize


def save_model(folder: str | Path, model: Savable, step: int | None = None) -> None:
    """Write a checkpoint folder."""
    with _appearing(Path(folder), model.num_bytes) as draft:
        _write(draft, model, step)


def save_step(folder: str | Path, models: Mapping[str, Savable], step: int) -> None:
    """Write `step_000100/{role}/` for each model into `folder`, then let `latest` name it."""
    target = Path(folder) / f"step_{step:06d}"
    with _appearing(target, sum(model.num_bytes for model in models.values())) as draft:
        for role, model in models.items():
            on_rank_0(f"making {draft / role}", (draft / role).mkdir)
            _write(draft / role, model, step)
    on_rank_0(f"writing {Path(folder) / LATEST}", lambda: write_text(Path(folder) / LATEST, f"{target.name}\n"))


@contextmanager
def _appearing(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A draft that gets the folder's name at the end of the block, unless the block raises."""
    drafts: list[Path] = []
    try:
        on_rank_0(f"making a draft of {folder}", lambda: drafts.append(start_draft(folder, num_bytes)))
        yield draft_of(folder)
        on_rank_0(f"moving {folder} into place", lambda: move_into_place(draft_of(folder), folder))
    except BaseException:
        for draft in drafts:
            shutil.rmtree(draft, ignore_errors=True)
        raise


def _write(folder: Path, model: Savable, step: int | None) -> None:
    """All files of a checkpoint, into an empty folder that is there."""
    with model.groups.active():
        shards = together(f"finding the shards of {folder}", lambda: sharded_tensors(model.chunks))
        write_shards(folder, shards)
    on_rank_0(f"completing {folder}", lambda: _complete(folder, model, step))


def _complete(folder: Path, model: Savable, step: int | None) -> None:
    """On rank 0: look at what was written, add `hf/` and the manifest."""
    shape, layout = model.chunks[0].shape, model.groups.layout
    files = ShardFiles(folder)
    compare_names(megatron_tensors(shape, layout.tp), files.shapes, f"what was written to {folder}")
    elsewhere = sorted(name for name in files.files if not (folder / name).is_file())
    if elsewhere:
        raise RunFailed(f"{elsewhere[0]} is not in {folder} as rank 0 sees it; all ranks must write to one shared file system")
    dtypes = model.dtypes or {
        name.format(layer=layer): files.dtypes[stored_name(rule.megatron.format(layer=layer))]
        for rule, layer in rules_in_order(shape)
        for name in rule.hf
    }
    complete_common_state(folder, CONTENT)
    (folder / HF).mkdir()
    carry_files(model.hf_source, folder / HF, shape, largest_dtype(dtypes, expected_hf_tensors(shape)))
    dtype, others = compact_dtypes({name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()})
    degrees = {name: value for name, value in asdict(layout).items() if name not in ("num_layers", "key")}
    versions = {"megappo": __version__, "megatron-core": version("megatron-core"), "torch": str(torch.__version__)}
    write_manifest(
        folder,
        Manifest(
            head=shape.head,
            step=step,
            dtype=dtype,
            other_dtypes=others,
            layout=degrees,
            versions=versions | {"python": platform.python_version()},
            files=file_sizes(folder),
        ),
    )
