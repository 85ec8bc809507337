"""What is a batch on its way through a step? `DataProto`: tensors, columns of any other values, and facts about the whole.

Every row is one sample. Tensors live in a TensorDict; other columns are one-dimensional object arrays. Operations give a new
batch that shares what it can, except `reorder`, which is in place. Rows that only fill a batch up are marked and never count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import Tensor

from megappo.data.columns import Objects, chosen, object_column, short, united

Index: TypeAlias = slice | Tensor | Sequence[int] | npt.NDArray[Any]

ROW_MASK = "row_mask"
"""(b,) bool column of a padded batch: False where a row only fills it up."""
COUNTING_MASKS = ("response_mask",)
"""Columns that say which tokens count: zero in padding rows, so that losses and means over tokens leave those out."""


class DataProto:
    """One batch. `batch`: tensors by name, `non_tensor_batch`: object arrays by name, `meta_info`: facts by name."""

    def __init__(
        self,
        batch: TensorDict,
        non_tensor_batch: Mapping[str, Objects] | None = None,
        meta_info: Mapping[str, Any] | None = None,
    ) -> None:
        if len(batch.batch_size) != 1:
            raise ValueError(f"a batch has rows alone as batch size, not {tuple(batch.batch_size)}")
        self.batch = batch
        self.non_tensor_batch = dict(non_tensor_batch or {})
        self.meta_info = dict(meta_info or {})
        for name, column in self.non_tensor_batch.items():
            if len(column) != len(self):
                raise ValueError(f"column {name!r} has {len(column)} rows, the batch {len(self)}")
            if name in batch:
                raise ValueError(f"{name!r} is a tensor and another column, too")

    @staticmethod
    def from_dict(
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence[Any] | npt.NDArray[Any]] | None = None,
        meta_info: Mapping[str, Any] | None = None,
        num_rows: int | None = None,
    ) -> DataProto:
        """A batch of columns that all have the same number of rows. num_rows: needed where there is no column."""
        tensors, non_tensors = tensors or {}, non_tensors or {}
        counts: dict[str, int | None] = {name: tensor.shape[0] if tensor.dim() else None for name, tensor in tensors.items()}
        counts |= {name: len(column) for name, column in non_tensors.items()}
        rows = num_rows if num_rows is not None else next(iter(counts.values()), None)
        if num_rows is None and not counts:
            raise ValueError("a batch without a column needs num_rows")
        if rows is None or set(counts.values()) - {rows}:
            raise ValueError(f"a batch needs columns that all have the same number of rows, not {counts}")
        batch = TensorDict(dict(tensors), batch_size=[rows])
        return DataProto(batch, {name: object_column(column) for name, column in non_tensors.items()}, meta_info)

    def __len__(self) -> int:
        return int(self.batch.batch_size[0])

    def __repr__(self) -> str:
        tensors = {name: (str(t.dtype).removeprefix("torch."), *t.shape) for name, t in self.tensors().items()}
        return f"DataProto({len(self)} rows, {tensors}, {sorted(self.non_tensor_batch)}, meta {sorted(self.meta_info)})"

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, as what takes a plain mapping wants them."""
        return {str(name): tensor for name, tensor in self.batch.items()}

    @property
    def row_mask(self) -> Tensor:
        """(b,) bool: False for rows that only fill the batch up."""
        if ROW_MASK in self.batch:
            mask: Tensor = self.batch[ROW_MASK]
            return mask
        return torch.ones(len(self), dtype=torch.bool, device=self.batch.device)

    def __getitem__(self, index: Index) -> DataProto:
        """The rows of a slice, of indices in any order, or of a mask."""
        if isinstance(index, slice):
            columns = {name: column[index] for name, column in self.non_tensor_batch.items()}
            return DataProto(self.batch[index], columns, self.meta_info)
        rows = torch.as_tensor(index)
        if rows.dim() != 1 or (rows.numel() and rows.dtype not in (torch.bool, torch.int64, torch.int32)):
            raise IndexError(f"rows are chosen by a slice, a list of whole numbers or a mask, not by {index!r}")
        rows = rows if rows.dtype == torch.bool else rows.long()
        limit = len(self)
        if rows.dtype == torch.bool and len(rows) != limit:
            raise IndexError(f"a mask of {len(rows)} rows does not fit a batch of {limit}")
        if rows.dtype == torch.int64 and rows.numel() and not bool(((rows >= -limit) & (rows < limit)).all()):
            raise IndexError(f"row {int(rows[(rows < -limit) | (rows >= limit)][0])} is not in a batch of {limit} rows")
        where = rows.to(self.batch.device) if self.batch.device is not None else rows
        picked = rows.cpu().numpy()
        return DataProto(
            self.batch[where], {name: column[picked] for name, column in self.non_tensor_batch.items()}, self.meta_info
        )

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Only these columns and facts; None: all of a kind. The mark of padding rows stays."""
        names = None if batch_keys is None else list(batch_keys)
        if names is not None and ROW_MASK in self.batch and ROW_MASK not in names:
            names.append(ROW_MASK)
        tensors = chosen(self.tensors(), names, "tensor")
        columns = chosen(self.non_tensor_batch, non_tensor_batch_keys, "non-tensor column")
        facts = chosen(self.meta_info, meta_info_keys, "fact")
        return DataProto(TensorDict(tensors, batch_size=[len(self)], device=self.batch.device), columns, facts)

    def union(self, other: DataProto) -> DataProto:
        """All columns and facts of both. Those with the same name must be equal, where NaN equals NaN."""
        batch = union_tensor_dict(self.batch, other.batch)
        columns = united(self.non_tensor_batch, other.non_tensor_batch, "non-tensor column")
        return DataProto(batch, columns, united(self.meta_info, other.meta_info, "fact"))

    def reorder(self, indices: Tensor | Sequence[int] | npt.NDArray[Any]) -> None:
        """Put row indices[i] at place i. Note that this operation is in place. `indices` must be a permutation of the rows."""
        order = torch.as_tensor(indices).cpu()
        if order.dtype == torch.bool or sorted(order.tolist()) != list(range(len(self))):
            raise ValueError(f"cannot reorder {len(self)} rows by {short(order)}: it must name each row exactly once")
        reordered = self[order.long()]
        self.batch, self.non_tensor_batch = reordered.batch, reordered.non_tensor_batch

    def split(self, size: int) -> list[DataProto]:
        """Consecutive batches of `size` rows, the last one smaller where they do not divide."""
        if size < 1:
            raise ValueError(f"cannot split into batches of {size} rows; give 1 or more")
        return [self[start : start + size] for start in range(0, len(self), size)]

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        """The rows of all parts one below the other. Columns must be the same in all; facts of the same name must be equal."""
        if not parts:
            raise ValueError("there is nothing to concatenate: give one batch or more")
        names, columns = set(parts[0].tensors()), set(parts[0].non_tensor_batch)
        meta: dict[str, Any] = {}
        for number, part in enumerate(parts):
            for kind, have, want in (("tensors", set(part.tensors()), names), ("columns", set(part.non_tensor_batch), columns)):
                if have != want:
                    raise ValueError(
                        f"part {number} cannot be concatenated to part 0: {kind} missing {sorted(want - have)}, "
                        f"more than there {sorted(have - want)}"
                    )
            for name in names:
                like, tensor = parts[0].batch[name], part.batch[name]
                if (tensor.dtype, tensor.shape[1:]) != (like.dtype, like.shape[1:]):
                    raise ValueError(
                        f"{name!r} of part {number} is {tensor.dtype} {tuple(tensor.shape)}, of part 0 {like.dtype} "
                        f"{tuple(like.shape)}: only the rows may differ"
                    )
            meta = united(meta, part.meta_info, "fact")
        batch = torch.cat([part.batch for part in parts])
        return DataProto(batch, {c: np.concatenate([part.non_tensor_batch[c] for part in parts]) for c in columns}, meta)

    def repeat(self, repeat_times: int, interleave: bool = True) -> DataProto:
        """Each row `repeat_times` times: a a b b, or without interleave a b a b."""
        if repeat_times < 0:
            raise ValueError(f"cannot repeat rows {repeat_times} times")
        rows = torch.arange(len(self))
        return self[rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times)]

    def make_iterator(self, mini_batch_size: int, epochs: int, seed: int) -> Iterator[DataProto]:
        """Mini-batches over `epochs` passes, each in an order of its own that `seed` and the number of rows alone decide: every
        rank with the same rows gets the same ones. The last of a pass is smaller where the size does not divide the rows."""
        if mini_batch_size < 1 or epochs < 0:
            raise ValueError(f"mini_batch_size={mini_batch_size} must be 1 or more, epochs={epochs} not negative")
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            order = torch.randperm(len(self), generator=generator)
            for start in range(0, len(self), mini_batch_size):
                yield self[order[start : start + mini_batch_size]]


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """(data with rows repeated from the start, over and over, until `size_divisor` divides their number; how many were added).

    Already divisible: the same object and 0. What is added is marked in `row_mask` and has no token that counts."""
    if size_divisor < 1:
        raise ValueError(f"cannot pad to a multiple of {size_divisor}; give 1 or more")
    pad_size = -len(data) % size_divisor
    if not pad_size:
        return data, 0
    padded = data[torch.arange(len(data) + pad_size) % len(data)]
    mask = padded.row_mask.clone()
    mask[len(data) :] = False
    padded.batch[ROW_MASK] = mask
    for name in COUNTING_MASKS:
        if name in padded.batch:
            padded.batch[name][len(data) :] = 0
    return padded, pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """`data` without its last `pad_size` rows: what `pad_dataproto_to_divisor` added. 0: the same object.

    An error where rows that count would go: then the batch is not in the order in which it was padded."""
    if not pad_size:
        return data
    if not 0 < pad_size <= len(data):
        raise ValueError(f"cannot take {pad_size} padding rows off a batch of {len(data)}")
    rest = data[: len(data) - pad_size]
    if ROW_MASK in data.batch:
        counting = int(data.row_mask[len(rest) :].sum())
        if counting:
            raise ValueError(
                f"{counting} of the last {pad_size} rows are no padding; put the batch back in its own order before unpadding it"
            )
        if bool(rest.row_mask.all()):
            del rest.batch[ROW_MASK]
    return rest


def union_tensor_dict(first: TensorDict, second: TensorDict) -> TensorDict:
    """The tensors of both. Batch sizes must be equal; tensors of the same name, too, where NaN equals NaN."""
    if first.batch_size != second.batch_size:
        raise ValueError(f"batches of {tuple(first.batch_size)} and {tuple(second.batch_size)} rows cannot be united")
    return TensorDict(
        united(dict(first.items()), dict(second.items()), "tensor"), batch_size=first.batch_size, device=first.device
    )
