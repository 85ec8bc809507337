"""How does verl (0.9.1) do it? `per_tensor_generator` on our chunks; its advantages, balanced partitions and output head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.peers import fused_norm_name
from megappo.models.shape import ModelShape


def load() -> None:
    import verl.models.mcore.weight_converter
    import verl.utils.megatron_utils

    verl.utils.megatron_utils.get_device_id = lambda: "cpu"


def version() -> str:
    import verl

    return str(verl.__version__)


def hand_over(
    chunks: Sequence[torch.nn.Module], shape: ModelShape, groups: Any
) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """What gives all complete tensors by name, on every rank. Called inside `groups.active()`, as is its result."""
    from verl.models.mcore.weight_converter import McoreToHFWeightConverterDense
    from verl.utils.megatron_utils import per_tensor_generator

    class Converter(McoreToHFWeightConverterDense):  # type: ignore[misc]
        def convert_param(self, name: str, params_one_group: list[torch.Tensor]) -> Any:
            return super().convert_param(fused_norm_name(name), params_one_group)

    config = chunks[0].config
    hf_config = SimpleNamespace(
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads, tie_word_embeddings=shape.tied
    )
    converter = Converter(hf_config, config)
    names = {"qkv_layer_name": "self_attention.linear_qkv.", "gate_proj_layer_name": "linear_fc1."}
    return lambda: per_tensor_generator(list(chunks), hf_config, converter, config, names)


def load_gae() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    return compute_gae_advantage_return  # type: ignore[no-any-return]


def load_balance() -> Callable[[list[int], int, bool], list[list[int]]]:
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    return get_seqlen_balanced_partitions  # type: ignore[no-any-return]


def load_batch() -> Any:
    """Its DataProto, the class."""
    from verl import DataProto

    return DataProto


def load_heads() -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Its functions ask megatron for the tensor-parallel group: that of a world of one, where there is none yet."""
    from megatron.core import parallel_state as mpu
    from verl.utils.megatron.tensor_parallel import vocab_parallel_entropy, vocab_parallel_log_probs_from_logits

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not mpu.model_parallel_is_initialized():
        mpu.initialize_model_parallel(1)

    def log_probs_and_entropy(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As its Megatron engine calls them: on a clone, since the log-probs' pass overwrites what the entropy's needs."""
        clone = logits.clone()
        entropy = vocab_parallel_entropy(logits)
        return vocab_parallel_log_probs_from_logits(clone, labels), entropy

    return log_probs_and_entropy
