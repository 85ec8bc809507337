"""What is a parameter's complete name? From the names inside a chunk, whose layers count from 0, to the whole model's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from megappo.errors import RunFailed
from megappo.parallel_state.layout import ParallelLayout

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_LAYER = re.compile(r"^(decoder\.layers\.)(\d+)(\..+)$")


def get_all_params(chunks: Sequence[torch.nn.Module]) -> list[dict[str, torch.Tensor]]:
    """This rank's part of [pp][chunk]{local name: tensor}: parameters and persistent buffers, no copy.

    Wrappers (DDP, Float16Module) leave no trace in the names; a tensor that has two names comes once."""
    return [_params_of(chunk) for chunk in chunks]


def normalize_pp_vpp_params(params: Sequence[Sequence[Mapping[str, T]]], layout: ParallelLayout) -> dict[str, T]:
    """[pp][chunk]{local name: value} to {complete Megatron name: value}, layers numbered globally.

    Raises RunFailed for a name that two chunks give, a layer number outside of its chunk, and a layer that no chunk has."""
    if len(params) != layout.pp or any(len(chunks) != layout.vpp for chunks in params):
        raise RunFailed(
            f"got {[len(chunks) for chunks in params]} chunks a stage; the layout has pp={layout.pp}, vpp={layout.vpp}"
        )
    complete: dict[str, T] = {}
    origin: dict[str, str] = {}
    for stage, chunks in enumerate(params):
        for chunk, named in enumerate(chunks):
            for local_name, value in named.items():
                name = complete_name(local_name, layout, stage, chunk)
                where = f"stage {stage}, chunk {chunk} ({local_name})"
                if name in complete:
                    raise RunFailed(f"{name} comes twice: from {origin[name]} and from {where}")
                complete[name], origin[name] = value, where
    held = {int(match[2]) for match in map(_LAYER.match, complete) if match}
    absent = [layer for layer in range(layout.num_layers) if layer not in held]
    if absent:
        raise RunFailed(f"no chunk holds layers {absent} of {layout.num_layers}")
    return complete


def complete_name(local_name: str, layout: ParallelLayout, stage: int, chunk: int) -> str:
    """Megatron's name with the global layer number."""
    match = _LAYER.match(local_name)
    if not match:
        return local_name
    layers = layout.layers(stage, chunk)
    if int(match[2]) >= len(layers):
        raise RunFailed(f"stage {stage}, chunk {chunk}: {local_name} is not one of its {len(layers)} layers; they count from 0")
    return f"{match[1]}{layers[int(match[2])]}{match[3]}"


def _params_of(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in chunk.named_modules():
        path = f"{prefix}."
        while path.startswith("module."):
            path = path.removeprefix("module.")
        path = path.removeprefix(".")
        transient = module._non_persistent_buffers_set
        for name, tensor in (*module._parameters.items(), *((n, b) for n, b in module._buffers.items() if n not in transient)):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                named[path + name] = tensor
    return named
