"""How do ragged prompts and responses become a padded batch? `pad_batch`: prompts on the left, responses on the right.

legend: b samples, p prompt width, r response width, s = p + r
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megappo.algorithms.masking import mask_from_lengths
from megappo.data.proto import DataProto


def pad_batch(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int) -> DataProto:
    """input_ids (b, s) int64, attention_mask (b, s) bool, response_mask (b, r) bool, sample_ids (b,) int64.

    Prompts are padded on the left, responses on the right. Masks come from lengths, so a pad id may stand for something real."""
    p, r = max(map(len, prompts)), max(map(len, responses))
    input_ids = torch.full((len(prompts), p + r), pad_id, dtype=torch.long)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        input_ids[i, p - len(prompt) : p + len(response)] = torch.tensor([*prompt, *response])
    response_mask = mask_from_lengths(torch.tensor([len(x) for x in responses]), r)
    prompt_mask = mask_from_lengths(torch.tensor([len(x) for x in prompts]), p).flip(1)
    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "attention_mask": torch.cat((prompt_mask, response_mask), dim=1),
            "response_mask": response_mask,
            "sample_ids": torch.arange(len(prompts)),
        }
    )


def pad_columns(rows: Sequence[Sequence[float]], width: int) -> Tensor:
    """(b, width) float32 from ragged rows, zero behind their ends."""
    out = torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row)
    return out
