"""What are each sentence's log-probs, where sentences stand packed one behind the other? `log_probs_from_packed_logits`.

legend: b sentences, s padded width, r response width, nnz tokens that are no padding, V vocabulary, t tensor-parallel degree
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from megappo.models.vocab_parallel import vocab_parallel_log_probs_from_logits


def log_probs_from_packed_logits(
    logits: Tensor,
    input_ids: Tensor,
    attention_mask: Tensor,
    response_length: int,
    *,
    vocab_size: int,
    temperature: float = 1.0,
    tp_rank: int = 0,
    tp_group: Any = None,
    overwrite_logits: bool = False,
) -> Tensor:
    """Log-probs (b, r) of the response tokens, which stand in the last r = response_length columns of the padded batch.

    logits: (nnz, padded V / t) of the packed tokens; input_ids: (1, nnz) these tokens; attention_mask: (b, s) where they stood.
    A token is predicted by the token in front of it in its own sentence. 0 where there is none: padding, a sentence's start.
    The rest as `vocab_parallel_log_probs_and_entropy`.
    """
    rows, columns = attention_mask.nonzero(as_tuple=True)  # of each packed token
    labels = input_ids.squeeze(0).roll(-1)  # at a sentence's end it is another's first token: left out below
    log_probs = vocab_parallel_log_probs_from_logits(
        logits,
        labels,
        vocab_size=vocab_size,
        temperature=temperature,
        tp_rank=tp_rank,
        tp_group=tp_group,
        overwrite_logits=overwrite_logits,
    )
    b, s = attention_mask.shape
    follows = rows[1:] == rows[:-1]
    is_response = columns[1:] >= s - response_length
    scored = (follows & is_response).nonzero().squeeze(1)
    out = log_probs.new_zeros(b, response_length)
    return out.index_put((rows[1:][scored], columns[1:][scored] - (s - response_length)), log_probs[:-1][scored])
