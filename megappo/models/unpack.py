"""How do results of packed tokens come back to their sentences? `unpack_responses`: log-probs, entropies, values.

legend: b sentences, r response width, nnz tokens of a pack, n scored tokens of a pack, V vocabulary, t tensor-parallel degree
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megappo.models.microbatch import MicroBatch


def unpack_responses(
    micro_batches: Sequence[MicroBatch], results: Sequence[Mapping[str, Tensor]], shape: tuple[int, ...]
) -> dict[str, Tensor]:
    """Columns `shape` = (b, r), float32 in host memory, of results of the packs; 0 where no response token stands.

    With packs (padding removed, "rmpad") the model sees ids (1, nnz) and log-probs are taken from the logits (n, V / t) of the
    tokens in front of response tokens, each in front of one of its own sentence. Here they get back to (b, r).
    results: for each micro-batch, by name, (n,) in the order of its scored tokens.
    """
    columns: dict[str, Tensor] = {}
    for micro_batch, found in zip(micro_batches, results, strict=True):
        counts = micro_batch.mask
        place = micro_batch.rows[counts].cpu(), micro_batch.columns[counts].cpu()
        for name, values in found.items():
            columns.setdefault(name, torch.zeros(shape))[place] = values[counts].float().cpu()
    return columns
