"""Whose real code stands beside ours? One adapter a peer: what it takes to run that code on a CPU, in our ranks, unchanged.

Adapters are ours; the peers come from the environment that MEGAPPO_PEERS_PY names and the source trees in MEGAPPO_PEERS_SRC.
What an adapter loads it imports once, before ranks are forked, or it raises ImportError: `optional` says so and goes on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")
versions: dict[str, str] = {}  # of the peers that were loaded


def optional(adapter: ModuleType, load: Callable[[], T]) -> T | None:
    """What `load` gives, or None where the adapter's peer is not there."""
    name = adapter.__name__.rpartition(".")[2]
    try:
        loaded = load()
    except ImportError as error:
        print(f"peer {name}: skipped (not installed): {error}", flush=True)
        return None
    versions[name] = adapter.version()
    return loaded


def source_root(tree: str) -> Path:
    """The folder MEGAPPO_PEERS_SRC/tree."""
    return Path(os.environ.get("MEGAPPO_PEERS_SRC", "")) / tree


def use_source(tree: str, module: str) -> None:
    """Put a peer's source tree before all others on the import path, so that `module` comes from there."""
    root = source_root(tree)
    if not (root / module).is_dir():
        raise ImportError(f"MEGAPPO_PEERS_SRC has no {tree}/{module}")
    sys.path.insert(0, str(root))


# Both verl and slime know the norms by the names that TransformerEngine's fused layers give them.
NORM_NAMES = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}


def fused_norm_name(name: str) -> str:
    for local, fused in NORM_NAMES.items():
        name = name.replace(local, fused)
    return name
