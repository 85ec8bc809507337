"""How do `megappo import` and `megappo export` work? From a Hugging Face folder on the ranks of a layout; back in one process.

Torch and Megatron are imported once the arguments hold, so that a refusal is instant.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.checkpoint.format import read_manifest, require_replaceable
from megappo.config.check import Plan, check_here
from megappo.config.load import load_overrides, overridden_keys
from megappo.errors import RunFailed, UserError
from megappo.models.shape import checkpoint_folder

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("megappo")

_IMPORT_KEYS = ("model.dtype", "actor.parallel", "run.launcher", "run.watchdog_s", "run.threads_per_rank")
_EXPORT_DTYPES = ("float32", "bfloat16", "float16")


def import_model(hf_dir: str, checkpoint: str, overrides: Sequence[str]) -> int:
    """Write the checkpoint folder of a Hugging Face folder, under the layout in `overrides`. Returns the exit code.

    Parameters are held in the folder's dtype, in float32 where the folder has float16 or several; model.dtype asks for another.
    Raises UserError or RunFailed; what was there under the checkpoint's name is then still there."""
    from megappo.controller.launch import run_on_ranks, speaks_for_all

    plan = import_plan(hf_dir, checkpoint, overrides)
    dtype, dtypes = import_dtypes(plan, is_chosen="model.dtype" in overridden_keys(overrides))
    target = Path(checkpoint)
    log_dir = target.with_name(f".{target.name}.import")  # logs of the ranks; kept if one fails
    entry = functools.partial(_import_on_rank, plan, target, dtype, dtypes, log_dir)
    code = run_on_ranks(plan.config.run, plan.world_size, entry, log_dir, _preload)
    if code == 0 and speaks_for_all(plan.config.run):
        shutil.rmtree(log_dir, ignore_errors=True)
        logger.info("%s: %.1f M parameters, held in %s", checkpoint, plan.shapes["actor"].num_parameters / 1e6, dtype)
    return code


def export_model(checkpoint: str, hf_dir: str, overrides: Sequence[str]) -> int:
    """Write the Hugging Face folder of a checkpoint (of a step folder: of its actor). Returns the exit code.

    Tensors get the dtypes of the folder that was imported, or those that training held them in; model.dtype asks for another.
    Raises UserError or RunFailed; nothing that was there is overwritten."""
    dtype = _export_dtype(overrides)
    if (world_size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(f"WORLD_SIZE={world_size}, but an export is one process; start `megappo export` without torchrun")
    folder, manifest = read_manifest(checkpoint)
    target = Path(hf_dir)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError(f"{hf_dir!r} exists and is not overwritten; give another name or remove it")
    import torch

    from megappo.checkpoint.source import hf_tensors
    from megappo.models.families import shape_of
    from megappo.pp_weights.hf_writer import write_hf_folder
    from megappo.pp_weights.mapping import expected_hf_tensors

    names = expected_hf_tensors(shape_of(folder))
    dtypes = {name: getattr(torch, dtype or manifest.dtype_of(name)) for name in names}
    try:
        write_hf_folder(target, hf_tensors(folder), dtypes, config_from=folder)
    except OSError as error:
        raise RunFailed(f"writing {hf_dir} failed: {error}") from error
    kinds = " and ".join(sorted({str(kind).removeprefix("torch.") for kind in dtypes.values()}))
    logger.info("%s: %d tensors in %s", hf_dir, len(names), kinds)
    return 0


def import_plan(hf_dir: str, checkpoint: str, overrides: Sequence[str]) -> Plan:
    """What an import is to do; raises UserError before any work where it cannot."""
    for key in overridden_keys(overrides):
        if not any(key == known or key.startswith(f"{known}.") for known in _IMPORT_KEYS):
            raise UserError(f"{key} means nothing to `megappo import`; it takes {', '.join(_IMPORT_KEYS)}")
    if checkpoint_folder(hf_dir) is not None:
        raise UserError(f"{hf_dir!r} is a checkpoint already; give a Hugging Face folder, or use it as it is")
    config = load_overrides(overrides, {"model": {"path": hf_dir}}, "import")
    plan = check_here(config, "import", os.environ)
    require_replaceable(checkpoint)
    return plan


def import_dtypes(plan: Plan, is_chosen: bool) -> tuple[str, Mapping[str, torch.dtype] | None]:
    """(dtype to hold the parameters in, dtype of each tensor's default export); None: as held.

    float32 holds every float16 and bfloat16 number exactly."""
    import torch

    from megappo.pp_weights.hf_io import HFReader
    from megappo.pp_weights.mapping import expected_hf_tensors

    shape = plan.shapes["actor"]
    with HFReader(plan.config.model.path) as reader:
        reader.check(shape)
        dtypes = reader.dtypes(expected_hf_tensors(shape))
    if is_chosen:
        return plan.config.model.dtype, None
    body = {dtype for name, dtype in dtypes.items() if name != "score.weight"}  # a value head is held in float32 anyway
    return "bfloat16" if body == {torch.bfloat16} else "float32", dtypes


def _preload() -> None:
    """Import once what all ranks need, so that they are forked ready."""
    from megappo.parallel_state.device import import_megatron

    import_megatron()
    importlib.import_module("megappo.checkpoint.save")
    importlib.import_module("megappo.checkpoint.load")


def _import_on_rank(plan: Plan, target: Path, dtype: str, dtypes: Mapping[str, torch.dtype] | None, log_dir: Path) -> int:
    """One rank's life."""
    import torch
    import torch.distributed as dist

    _preload()
    from megappo.controller.rendezvous import join_world
    from megappo.controller.watchdog import Watchdog
    from megappo.parallel_state.device import start_world

    run = plan.config.run
    torch.set_num_threads(run.threads_per_rank)
    rank, world_size, store = join_world(os.environ)
    with Watchdog(store, rank, world_size, log_dir, run.watchdog_s) as watchdog, watchdog.phase("importing the model"):
        start_world(store, rank, world_size)
        convert(plan, target, dtype, dtypes)
        dist.destroy_process_group()
    return 0


def convert(plan: Plan, target: Path, dtype: str, dtypes: Mapping[str, torch.dtype] | None) -> None:
    """Read this rank's slices of the folder, write its shards of the checkpoint. Called by all ranks of a world that is there."""
    from megappo.checkpoint.load import load_weights
    from megappo.checkpoint.save import Savable, save_model
    from megappo.models.gpt import DTYPES, build_chunks
    from megappo.parallel_state.groups import create_role_groups

    source = plan.config.model.path
    groups = create_role_groups({"actor": plan.layouts["actor"]}, plan.config.run.seed)["actor"]
    with groups.active():
        chunks = build_chunks(plan.shapes["actor"], groups, DTYPES[dtype])
    load_weights(source, chunks, groups)
    save_model(target, Savable(chunks, groups, source, dtypes))


def _export_dtype(overrides: Sequence[str]) -> str | None:
    """The dtype that the user asks for. float16 is no dtype to train in, but one to export in."""
    dtype = None
    for text in overrides:
        key, _, dtype = text.partition("=")
        if key != "model.dtype":
            raise UserError(f"{key} means nothing to `megappo export`; it takes model.dtype")
        if dtype not in _EXPORT_DTYPES:
            raise UserError(f"model.dtype={dtype!r} is not possible; use one of {', '.join(_EXPORT_DTYPES)}")
    return dtype
