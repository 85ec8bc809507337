"""What are the complete Hugging Face tensors of a model path? `hf_tensors`, in one process, one Megatron parameter at a time.

A checkpoint is read with torch.distributed.checkpoint alone, without Megatron and without a collective, whether or not there is
a world. This is the independent way to what the ranks of a run hold: the start check and the export both take it.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megappo.checkpoint.format import read_manifest
from megappo.errors import UserError
from megappo.models.families import rules_in_order, shape_of
from megappo.models.shape import ModelShape, checkpoint_folder
from megappo.pp_weights.hf_io import HFReader
from megappo.pp_weights.mapping import rule_pieces
from megappo.pp_weights.verify import NamesDiffer, compare_names


def hf_tensors(path: str | Path, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of everything in a Hugging Face folder or a checkpoint, in the model's order, bit for bit as held there.

    dtype: to convert to. Raises UserError for a path that is neither."""
    if checkpoint_folder(path) is None:
        tensors = _of_hf_folder(Path(path))
    else:
        tensors = CheckpointReader(path).hf_tensors()
    for name, tensor in tensors:
        yield name, tensor if dtype is None else tensor.to(dtype)


def _of_hf_folder(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    shape = shape_of(folder)
    with HFReader(folder) as reader:
        reader.check(shape)
        for rule, layer in rules_in_order(shape):
            for name in rule.hf:
                yield name.format(layer=layer), reader.read(name.format(layer=layer))


class CheckpointReader:
    """The whole tensors of one checkpoint."""

    def __init__(self, path: str | Path) -> None:
        self.folder, self.manifest = read_manifest(path)
        self.shape = shape_of(self.folder, head=self.manifest.head)
        self._files = ShardFiles(self.folder)

    def hf_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor, as they are held."""
        require_model(self.folder, megatron_tensors(self.shape, self.manifest.layout["tp"]), self._files.shapes)
        for rule, layer in rules_in_order(self.shape):
            pieces = rule_pieces(rule, self.shape, 1, 0, layer, layer)
            param = self._files.read(stored_name(pieces[0].param))
            for piece in pieces:  # those of the vocabulary end before the padding, whatever tp it was saved under
                yield piece.hf_name, piece.local(param).reshape(piece.hf_shape)


class ShardFiles:
    """The tensors in a checkpoint's shard files, by their keys (`stored_name`); each is read whole, from however many shards."""

    def __init__(self, folder: Path) -> None:
        self._reader = _CachedReader(folder)
        try:
            metadata = self._reader.read_metadata()
        except Exception as error:  # noqa: BLE001 - a damaged pickle raises anything
            raise UserError(f"{folder / '.metadata'} cannot be read ({error!r}); copy the checkpoint again") from None
        # What else is there are Megatron's own objects, such as the common state of 0.19.
        tensors = {name: item for name, item in metadata.state_dict_metadata.items() if isinstance(item, TensorStorageMetadata)}
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(item.size) for name, item in tensors.items()}
        self.dtypes: dict[str, torch.dtype] = {name: item.properties.dtype for name, item in tensors.items()}
        self.files: set[str] = {place.relative_path for place in (metadata.storage_data or {}).values()}

    def read(self, name: str) -> torch.Tensor:
        tensor = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns where no_dist is asked for
            load({name: tensor}, storage_reader=self._reader, no_dist=True)
        return tensor


_FUSED_NORMS = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}


def stored_name(param: str) -> str:
    """A parameter's key in a checkpoint. Megatron files norms where TransformerEngine's fused layers have them, so that its
    checkpoints are the same with and without."""
    for own, fused in _FUSED_NORMS.items():
        param = param.replace(own, fused)
    return param


def megatron_tensors(shape: ModelShape, tp: int) -> dict[str, tuple[int, ...]]:
    """Key -> whole shape of every parameter, as tp ranks save them (tp decides how the vocabulary is padded)."""
    tensors = {}
    for rule, layer in rules_in_order(shape):
        piece = rule_pieces(rule, shape, 1, 0, layer, layer)[0]
        rows = shape.padded_vocab_size(tp) if rule.cut == "vocab" else piece.param_shape[0]
        tensors[stored_name(piece.param)] = (rows, *piece.param_shape[1:])
    return tensors


def require_model(
    folder: Path,
    expected: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, tuple[int, ...]],
    allow_missing: Collection[str] = (),
    allow_unexpected: Collection[str] = (),
) -> None:
    """Raise UserError, with the three lists, unless a checkpoint holds the tensors (name -> shape) that a model needs."""
    try:
        compare_names(expected, stored, f"{folder}: tensors do not fit the model", allow_missing, allow_unexpected)
    except NamesDiffer as error:
        raise UserError(f"{error}; give a checkpoint of this model") from None


class _CachedReader(FileSystemReader):
    """torch reads the metadata anew for each tensor."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata
