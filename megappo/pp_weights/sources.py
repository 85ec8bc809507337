"""Do the parameters lie where they lay? `SourceWatch` tells, so that views of them are made anew only if they have moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megappo.pp_weights.naming import get_all_params

_Place = tuple[dict[str, Any], str]
"""A module's own dictionary (of parameters, buffers or modules) and a name in it."""


class SourceWatch:
    """The parameters and persistent buffers of a model's chunks on this rank.

    params: [chunk]{local name: tensor}, as last looked up. They have moved where a module holds another tensor or another module
    under a name than before, or a tensor has another storage, shape or stride."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = chunks
        self.params: list[dict[str, torch.Tensor]] = []
        self._modules: list[tuple[_Place, object]] = []
        self._tensors: list[tuple[_Place, torch.Tensor, tuple[Any, ...]]] = []

    def have_moved(self) -> bool:
        """Whether anything differs from what was last accepted. `params` are looked up anew then, and are yet to be accepted."""
        if self.params and self._tensors and not self._differ():
            return False
        self.params = get_all_params(self._chunks)
        self._tensors = []
        return True

    def accept(self) -> None:
        """The views that were made of `params` hold from now on."""
        self._modules, self._tensors = [], []
        for chunk in self._chunks:
            for module in chunk.modules():
                self._modules += [((module._modules, name), child) for name, child in module._modules.items()]
                for owner in (module._parameters, module._buffers):
                    held = ((name, tensor) for name, tensor in owner.items() if tensor is not None)
                    self._tensors += [((owner, name), tensor, _where(tensor)) for name, tensor in held]

    def _differ(self) -> bool:
        return any(owner.get(name) is not child for (owner, name), child in self._modules) or any(
            owner.get(name) is not tensor or _where(tensor) != where for (owner, name), tensor, where in self._tensors
        )


def _where(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()
