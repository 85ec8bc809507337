"""How do padded samples become the rows that a pipeline pass runs? `make_micro_batches`, packed or padded.

Which token predicts which: the token in front of a response token carries its log-prob and its value.

legend: b samples of this data-parallel rank, s padded width, r response width, t packed tokens, n scored tokens
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.data.packing import groups_by_number


@dataclass(frozen=True)
class MicroBatch:
    """One pipeline micro-batch."""

    input_ids: Tensor
    """(1, t) packed, (rows, s) padded; int64"""
    positions: Tensor
    """like input_ids: position of each token in its own sequence"""
    attention: Tensor
    """packed: sequence lengths (int64, they sum to t); padded: bool mask of the real tokens (rows, s)"""
    scored: Tensor
    """(n,) index into the (tokens, rows) grid of the token in front of each response token"""
    labels: Tensor
    """(n,) the response tokens"""
    mask: Tensor
    """(n,) bool: False where the micro-batch is only there to fill the schedule"""
    rows: Tensor
    """(n,) sample of each scored token"""
    columns: Tensor
    """(n,) response column of each scored token"""
    fields: Mapping[str, Tensor]
    """(n,) each: columns of the batch at the scored tokens"""
    num_tokens: int
    """real tokens among input_ids; 0 where the micro-batch is only there to fill the schedule"""


@dataclass(frozen=True)
class MicroBatching:
    """How the samples of a micro-batch become rows.

    packed: one row without padding; else a padded row for each.
    length_multiple: a row's tokens are padded to a multiple of this (tp, with sequence parallel).
    """

    packed: bool = True
    length_multiple: int = 1


NUMBER = "micro_batch"
"""(b,) int64 column: the micro-batch of each sample, as `data.packing.plan_batch` numbers them."""


def make_micro_batches(
    batch: Mapping[str, Tensor], num_micro_batches: int, how: MicroBatching, fields: Iterable[str] = ()
) -> list[MicroBatch]:
    """The `num_micro_batches` micro-batches of a padded batch.

    batch: input_ids (b, s), attention_mask (b, s) bool, response_mask (b, r) bool, where the responses are the last r columns;
    micro_batch (b,); and a (b, r) tensor for each of `fields`. A micro-batch without samples gets a stand-in that counts nowhere,
    since every rank runs as many; b may be 0.
    """
    groups = groups_by_number(batch[NUMBER].tolist(), num_micro_batches)
    make = _packed if how.packed else _padded
    return [make(_rows(batch, group), how.length_multiple, tuple(fields)) for group in groups]


@dataclass(frozen=True)
class _Rows:
    """Some samples of the batch. `counts` is 0 for a stand-in that only fills the schedule."""

    batch: Mapping[str, Tensor]
    index: Tensor
    counts: bool

    def get(self, name: str) -> Tensor:
        return self.batch[name][self.index]


def _rows(batch: Mapping[str, Tensor], group: list[int]) -> _Rows:
    if group:
        return _Rows(batch, torch.tensor(group), counts=True)
    width = batch["input_ids"].shape[1]
    columns = batch["response_mask"].shape[1]
    device = batch["input_ids"].device
    stand_in = {
        name: torch.zeros(
            (1, columns if name not in ("input_ids", "attention_mask") else width), dtype=value.dtype, device=device
        )
        for name, value in batch.items()
        if value.dim() == 2
    }
    first = width - columns
    stand_in["attention_mask"][:, first - 1 : first + 1] = True
    stand_in["response_mask"][:, 0] = True
    return _Rows(stand_in, torch.tensor([0]), counts=False)


def _scored(rows: _Rows, fields: tuple[str, ...]) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor], Tensor]:
    """(local row, position in the sequence of the predicting token, labels, fields, response column) of the scored tokens."""
    response_mask, attention_mask, input_ids = rows.get("response_mask"), rows.get("attention_mask"), rows.get("input_ids")
    first = input_ids.shape[1] - response_mask.shape[1]
    local, column = response_mask.nonzero(as_tuple=True)
    positions = attention_mask.cumsum(dim=1) - 1
    predicting = positions[local, first + column] - 1
    values = {name: rows.get(name)[local, column] for name in fields}
    return local, predicting, input_ids[local, first + column], values, column


def _packed(rows: _Rows, length_multiple: int, fields: tuple[str, ...]) -> MicroBatch:
    attention_mask = rows.get("attention_mask")
    local, predicting, labels, values, column = _scored(rows, fields)
    lengths = attention_mask.sum(dim=1)
    starts = lengths.cumsum(0) - lengths
    ids = rows.get("input_ids")[attention_mask]
    positions = (attention_mask.cumsum(dim=1) - 1)[attention_mask]
    padding = -ids.numel() % length_multiple
    if padding:  # its own sequence behind the others, so that nothing attends to it
        ids = torch.cat((ids, ids.new_zeros(padding)))
        positions = torch.cat((positions, torch.arange(padding, device=positions.device)))
        lengths = torch.cat((lengths, lengths.new_tensor([padding])))
    return _micro_batch(rows, ids[None], positions[None], lengths, starts[local] + predicting, labels, local, column, values)


def _padded(rows: _Rows, length_multiple: int, fields: tuple[str, ...]) -> MicroBatch:
    attention_mask, ids = rows.get("attention_mask"), rows.get("input_ids")
    local, predicting, labels, values, column = _scored(rows, fields)
    padding = -ids.shape[1] % length_multiple
    if padding:
        ids = torch.nn.functional.pad(ids, (0, padding))
        attention_mask = torch.nn.functional.pad(attention_mask, (0, padding))
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    # The predicting token's place in the padded row: the last real token in front of the response token.
    place = torch.full_like(positions, -1)
    row, at = attention_mask.nonzero(as_tuple=True)
    place[row, positions[row, at]] = at
    scored = place[local, predicting] * ids.shape[0] + local
    return _micro_batch(rows, ids, positions, attention_mask, scored, labels, local, column, values)


def _micro_batch(
    rows: _Rows,
    ids: Tensor,
    positions: Tensor,
    attention: Tensor,
    scored: Tensor,
    labels: Tensor,
    local: Tensor,
    column: Tensor,
    values: dict[str, Tensor],
) -> MicroBatch:
    mask = torch.full(labels.shape, rows.counts, device=labels.device)
    index = rows.index.to(local.device)[local]
    num_tokens = int(rows.get("attention_mask").sum()) if rows.counts else 0
    return MicroBatch(ids, positions, attention, scored, labels, mask, index, column, values, num_tokens)
