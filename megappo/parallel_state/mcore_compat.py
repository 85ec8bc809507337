"""Where do megatron-core 0.16.1 (Python 3.11) and 0.19 (Python 3.12) differ? Each difference is one function here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch


def only_known(function: Any, **kwargs: Any) -> dict[str, Any]:
    """The keyword arguments that this megatron-core's `function` (or dataclass) knows; the others have gone or not come yet.

    Only for arguments whose absence means the default that we ask for."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in kwargs.items() if name in known}


def gloo_has_no_avg(ddp_config: Any) -> Any:
    """The DDP config, with averages taken as sums: gloo has no AVG reduction."""
    ddp_config.average_in_collective = False
    return ddp_config


def local_layer_spec(**kwargs: Any) -> Any:
    """Megatron's layer spec without TransformerEngine. 0.19 takes any arguments, 0.16.1 named ones."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return cast(Any, get_gpt_layer_local_spec)(**kwargs)


def complete_common_state(folder: Path, content: Mapping[str, Any]) -> None:
    """Give a written checkpoint the file `common.pt`, which 0.16.1 wants; 0.19 has its content among the shards, and reads both.

    content: what was saved as `content_metadata`."""
    if not (folder / "common.pt").exists():
        torch.save({"content_metadata": dict(content)}, folder / "common.pt")
