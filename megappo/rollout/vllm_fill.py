"""How do tensors get into vLLM's parameters? Three fillers: vLLM's layerwise loading, its `reload_weights`, and no copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Protocol

import torch

from megappo.errors import RunFailed
from megappo.pp_weights.update import Update
from megappo.rollout.vllm_layers import ShardLoading, clone_held, layer_tensors, put_layers_back, refresh_tied_head

Named = Iterator[tuple[str, torch.Tensor]]


class Filler(Protocol):
    """One way to fill a model. Calls come as begin, put for each bucket, end; or abandon, at any time."""

    def begin(self, update: Update) -> None: ...

    def put(self, tensors: Named, views: Mapping[str, torch.Tensor]) -> int:
        """Take the tensors of one bucket. When it returns, nothing reads the bucket's memory, which `views` lie in, any more.
        Returns the bytes that had to be copied for that, beside the copy into the parameters."""
        ...

    def end(self) -> None: ...

    def abandon(self) -> None: ...


class LayerwiseFiller:
    """vLLM's layerwise loading: a layer is processed (packed, on a CPU) as soon as all of it has come."""

    def __init__(self, model: Any, model_config: Any) -> None:
        self._model, self._model_config = model, model_config
        self._shards = ShardLoading(model)

    def begin(self, update: Update) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self._model)
        if update.shards > 1:
            self._shards.start()
        else:
            self._shards.stop()  # vLLM keeps the parameters of the load before, with the rank that they were given then

    def put(self, tensors: Named, views: Mapping[str, torch.Tensor]) -> int:
        self._model.load_weights(tensors)
        return clone_held(self._model, views)

    def end(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, self._model_config)
        self._shards.stop()
        refresh_tied_head(self._model)

    def abandon(self) -> None:
        put_layers_back(self._model, self._model_config)
        self._shards.stop()


class ReloadFiller:
    """vLLM's `reload_weights`, for a vLLM without the weight-transfer API. It takes the whole model in one call, so that buckets
    before the last are copied and kept. Memory: the model once more, with more than one bucket."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._kept: list[tuple[str, torch.Tensor]] = []
        self._buckets_left = 0

    def begin(self, update: Update) -> None:
        if update.shards > 1:
            raise RunFailed("this vLLM has no weight-transfer API and takes no shards of tensors; use pp_weights.gather=full")
        self._kept, self._buckets_left = [], update.num_buckets

    def put(self, tensors: Named, views: Mapping[str, torch.Tensor]) -> int:
        self._buckets_left -= 1
        if self._buckets_left > 0:
            come = [(name, tensor.clone()) for name, tensor in tensors]
            self._kept += come
            return sum(tensor.nbytes for _, tensor in come)
        self._runner.reload_weights(weights_iterator=chain(self._kept, tensors))
        self._kept = []
        return 0

    def end(self) -> None:
        refresh_tied_head(self._runner.get_model())

    def abandon(self) -> None:
        self._kept = []
        put_layers_back(self._runner.get_model(), self._runner.model_config)


class AliasFiller:
    """Zero copy: the parameters become views of the bucket's memory, which then stays mapped until the next version is in force.

    For linears that read their weight as it is (`use_plain_linears`), on a CPU. The memory holds the whole model, with q, k, v
    and gate, up side by side, and may not be written before the next version is in force."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._tensors: dict[str, torch.Tensor] = {}

    def begin(self, update: Update) -> None:
        if update.num_buckets > 1 or update.shards > 1:
            raise RunFailed(f"pp_weights.zero_copy=true takes whole tensors in one bucket, not {update.num_buckets}")
        self._tensors = {}

    def put(self, tensors: Named, views: Mapping[str, torch.Tensor]) -> int:
        self._tensors |= dict(tensors)
        return 0

    def end(self) -> None:
        targets = list(layer_tensors(self._model))
        joined = [side_by_side([part.name for part in target.parts], self._tensors) for target in targets]
        for target, tensor in zip(targets, joined, strict=True):
            parameter = getattr(target.module, target.attribute)
            if parameter.dtype != tensor.dtype:
                raise RunFailed(f"{target.parts[0].name} is {tensor.dtype}, the engine computes in {parameter.dtype}")
        for target, tensor in zip(targets, joined, strict=True):
            getattr(target.module, target.attribute).data = tensor
        self._tensors = {}

    def abandon(self) -> None:
        self._tensors = {}


def use_plain_linears() -> None:
    """Let vLLM's linears on a CPU read their weight where it lies, not a packed copy. To be called before the engine is made."""
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def side_by_side(names: list[str], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One tensor over several that follow each other in memory, joined along dimension 0. Raises RunFailed where they do not."""
    first, *others = found = [tensors[name] for name in names]
    end = first.data_ptr() + first.nbytes
    for name, tensor in zip(names[1:], others, strict=True):
        if tensor.data_ptr() != end or tensor.dtype != first.dtype:
            raise RunFailed(
                f"{name} does not follow {names[0]} in the buffer without a gap, which pp_weights.zero_copy=true needs; set "
                f"pp_weights.alignment_bytes=16, or turn it off"
            )
        end += tensor.nbytes
    rows = sum(tensor.shape[0] for tensor in found)
    return first.as_strided((rows, *first.shape[1:]), first.stride()) if others else first
