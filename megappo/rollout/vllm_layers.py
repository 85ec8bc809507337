"""Which HF tensors is each parameter of vLLM's model made of, and what must be known of its layers to fill them?

vLLM's own loaders do the filling. Here is what they leave open: names and shapes before the first load, shards in place of whole
tensors, memory that is written again, a tied head, and a load that stops half-way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One HF tensor. full: its shape; shard: the shape of the piece that this worker holds."""

    name: str
    full: Shape
    shard: Shape


@dataclass(frozen=True)
class LayerTensor:
    """A parameter of a vLLM layer (`getattr(module, attribute)`) and the HF tensors that lie in it, one below the other."""

    module: Any
    attribute: str
    parts: tuple[Part, ...]


def layer_tensors(model: torch.nn.Module) -> Iterator[LayerTensor]:
    """Every parameter of the model, from vLLM's modules: the parameters are fused, cut over tp, and on a CPU emptied."""
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    tied = is_tied(model)
    for path, module in model.named_modules():
        if isinstance(module, LinearBase):
            yield from _linear_tensors(path, module, packed)
        elif isinstance(module, VocabParallelEmbedding):
            if not (tied and isinstance(module, ParallelLMHead)):
                full = (module.org_vocab_size, module.embedding_dim)
                shard = (module.num_org_embeddings_per_partition, module.embedding_dim)
                yield LayerTensor(module, "weight", (Part(f"{path}.weight", full, shard),))
        else:
            for name, param in module.named_parameters(recurse=False):
                shape = tuple(param.shape)
                yield LayerTensor(module, name, (Part(f"{path}.{name}", shape, shape),))


def full_shapes(model: torch.nn.Module) -> dict[str, Shape]:
    """HF name -> full shape of every tensor that the model takes."""
    return {part.name: part.full for tensor in layer_tensors(model) for part in tensor.parts}


def shard_shapes(model: torch.nn.Module) -> dict[str, Shape]:
    """HF name -> shape of what this worker holds of it."""
    return {part.name: part.shard for tensor in layer_tensors(model) for part in tensor.parts}


def is_tied(model: Any) -> bool:
    return bool(getattr(model.config, "tie_word_embeddings", False))


def refresh_tied_head(model: Any) -> None:
    """vLLM's reload does not visit a head tied to the embedding: on a CPU its packed copy would keep the old weights."""
    if is_tied(model):
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def put_layers_back(model: torch.nn.Module, model_config: Any) -> None:
    """After a load that stopped half-way: the layers are whole again, some with old values and some with new ones.

    vLLM keeps what a layer has received until the layer is complete; left there, it would mix with the next update."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)


def clone_held(model: torch.nn.Module, views: Mapping[str, torch.Tensor]) -> int:
    """Copy what vLLM still holds of the memory behind `views`, which is about to be written again. Returns the bytes copied.

    Held is what belongs to a layer that is not complete: of q, k and v those that came first, and a vocabulary that vLLM pads
    (until the update is finished, since padding never arrives)."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    storages = {view.untyped_storage().data_ptr() for view in views.values()}
    cloned_bytes = 0
    for module in model.modules():
        for _, call in get_layerwise_info(module).loaded_weights:
            for name, value in call.arguments.items():
                if isinstance(value, torch.Tensor) and not value.is_meta and value.untyped_storage().data_ptr() in storages:
                    call.arguments[name] = value.clone()
                    cloned_bytes += value.nbytes
    return cloned_bytes


class ShardLoading:
    """While it is on, vLLM's loaders take this worker's shard of each tensor, where they would cut it from the whole.

    A loader takes rows (or columns) from `tp_rank x size` on; of a shard it must take them from 0 on, as the first worker does.
    So each layer is told that it is the first one, until `stop`: forward passes need the true rank again."""

    def __init__(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        self._linears: list[tuple[Any, int]] = []
        self._vocabularies: list[tuple[Any, Any, int]] = []
        for module in model.modules():
            if isinstance(module, LinearBase):
                self._linears.append((module, module.tp_rank))
            elif isinstance(module, VocabParallelEmbedding):
                self._vocabularies.append((module, module.shard_indices, module.org_vocab_size))

    def start(self) -> None:
        for layer, _ in self._linears:
            layer.tp_rank = 0
            layer.update_param_tp_status()  # the parameters have the rank too
        for layer, indices, _ in self._vocabularies:
            rows = indices.num_org_elements
            layer.shard_indices = replace(indices, org_vocab_start_index=0, org_vocab_end_index=rows)
            layer.org_vocab_size = rows

    def stop(self) -> None:
        for layer, rank in self._linears:
            layer.tp_rank = rank
            layer.update_param_tp_status()
        for layer, indices, vocab_size in self._vocabularies:
            layer.shard_indices, layer.org_vocab_size = indices, vocab_size


def _linear_tensors(path: str, module: Any, packed: Mapping[str, list[str]]) -> Iterator[LayerTensor]:
    from vllm.model_executor.layers.linear import (
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )

    parent, _, leaf = path.rpartition(".")
    names, rows, shard_rows = [leaf], [module.output_size], [module.output_size]
    columns = shard_columns = module.input_size
    if isinstance(module, QKVParallelLinear):
        q, kv, own_q, own_kv = module.total_num_heads, module.total_num_kv_heads, module.num_heads, module.num_kv_heads
        names = packed[leaf]
        rows = [q * module.head_size, kv * module.head_size, kv * module.v_head_size]
        shard_rows = [own_q * module.head_size, own_kv * module.head_size, own_kv * module.v_head_size]
    elif isinstance(module, MergedColumnParallelLinear):
        names, rows = packed[leaf], list(module.output_sizes)
        shard_rows = [size // module.tp_size for size in rows]
    elif isinstance(module, RowParallelLinear):
        shard_columns = module.input_size_per_partition
    elif isinstance(module, ColumnParallelLinear):
        shard_rows = [module.output_size_per_partition]
    full_names = [f"{parent}.{name}" if parent else name for name in names]
    cuts = list(zip(full_names, rows, shard_rows, strict=True))
    weights = (Part(f"{name}.weight", (full, columns), (shard, shard_columns)) for name, full, shard in cuts)
    yield LayerTensor(module, "weight", tuple(weights))
    if getattr(module, "bias", None) is not None:
        yield LayerTensor(module, "bias", tuple(Part(f"{name}.bias", (full,), (shard,)) for name, full, shard in cuts))
