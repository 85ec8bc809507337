"""How does slime do it? Its `HfWeightIteratorDirect` on our chunks hands complete tensors over; and its chunked advantages."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers import fused_norm_name, source_root, use_source
from megappo.models.shape import ModelShape

BUFFER_BYTES = 512 << 20  # slime's default of --update-weight-buffer-size


def load() -> None:
    use_source("slime", "slime")
    _stub("sglang.srt.utils.patch_torch", monkey_patch_torch_reductions=lambda: None)
    _stub("sglang.srt.utils", MultiprocessingSerializer=None)
    _stub("sglang.srt.weight_sync.tensor_bucket", FlattenedTensorBucket=None)
    from slime.backends.megatron_utils.update_weight import hf_weight_iterator_direct as direct
    from slime.utils import accelerator

    accelerator.current_device = lambda: torch.device("cpu")
    accelerator.synchronize = lambda: None
    direct.tqdm = lambda iterable, **options: iterable  # drawing a bar is not part of the hand-over
    convert = direct.convert_to_hf
    direct.convert_to_hf = lambda args, model, name, *rest, **options: convert(
        args, model, fused_norm_name(name), *rest, **options
    )


def version() -> str:
    """What its setup.py says; the package itself does not know."""
    found = re.search(r"version=\"([^\"]+)\"", (source_root("slime") / "setup.py").read_text())
    return found[1] if found else "unknown"


def hand_over(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, groups: Any
) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """What gives all complete tensors by name, on every rank. Called inside `groups.active()`, as is its result."""
    from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator_direct import HfWeightIteratorDirect
    from slime.utils.distributed_utils import set_gloo_group

    set_gloo_group(dist.group.WORLD)
    args = Namespace(
        num_experts=None,
        update_weight_buffer_size=BUFFER_BYTES,
        vocab_size=shape.vocab_size,
        q_lora_rank=None,
        kv_channels=shape.head_dim,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
    )
    wrapped = [_Wrapped(_Wrapped(chunk)) for chunk in chunks]  # as DDP and Float16Module do: slime counts on two prefixes
    iterator = HfWeightIteratorDirect(args, wrapped, model_name="llama", quantization_config=None)
    weights = dict(named_params_and_buffers(args, wrapped))

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in iterator.get_hf_weight_chunks(weights):
            yield from bucket

    return tensors


class _Wrapped(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.config = module.config


def load_gae() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    use_source("slime", "slime")
    from slime.utils.ppo_utils import chunked_gae

    return chunked_gae  # type: ignore[no-any-return]


def _stub(name: str, **attributes: Any) -> None:
    """A module of this name that holds what slime imports from sglang at its top and does not use here."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    for attribute, value in attributes.items():
        setattr(sys.modules[name], attribute, value)
