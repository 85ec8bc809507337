"""Do log-probs and entropies of packed sentences come back to where the sentences stood? Against a loop over padded ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megappo.models.microbatch import MicroBatching, make_micro_batches
from megappo.models.unpack import unpack_responses
from megappo.models.vocab_parallel import VocabularyShard, vocab_parallel_log_probs_and_entropy

VOCAB, PADDED, RESPONSE = 30, 32, 3
MASK = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0]]).bool()


def scene() -> tuple[dict[str, Tensor], Tensor]:
    """A padded batch whose samples are in the first and the third of three micro-batches; and logits (b, s, padded V)."""
    torch.manual_seed(0)
    batch = {
        "input_ids": torch.randint(0, VOCAB, MASK.shape).masked_fill(~MASK, 0),
        "attention_mask": MASK,
        "response_mask": MASK[:, -RESPONSE:] & torch.tensor([True, True, False]),  # a tool's answer is not scored
        "micro_batch": torch.tensor([0, 2, 0, 2]),
    }
    return batch, torch.randn(*MASK.shape, PADDED)


def through_micro_batches(batch: dict[str, Tensor], logits: Tensor, packed: bool) -> dict[str, Tensor]:
    micro_batches = make_micro_batches(batch, 3, MicroBatching(packed=packed))
    results = []
    for number, micro_batch in enumerate(micro_batches):
        own = batch["micro_batch"] == number
        if not own.any():
            grid = torch.full((*micro_batch.input_ids.shape, PADDED), torch.nan)  # a stand-in, whatever comes out of it
        else:
            grid = logits[own][MASK[own]][None] if packed else logits[own]
        picked = grid.transpose(0, 1).flatten(0, 1)[micro_batch.scored]  # as GPTChunk does
        log_probs, entropy = vocab_parallel_log_probs_and_entropy(picked, micro_batch.labels, VocabularyShard(VOCAB))
        results.append({"log_probs": log_probs, "entropy": entropy})
    return unpack_responses(micro_batches, results, batch["response_mask"].shape)


@pytest.mark.parametrize("packed", [True, False])
def test_each_sentence_has_its_own_log_probs_and_entropies(packed: bool) -> None:
    batch, logits = scene()
    want, want_entropy = torch.zeros(len(MASK), RESPONSE), torch.zeros(len(MASK), RESPONSE)
    first = MASK.shape[1] - RESPONSE
    for i, j in batch["response_mask"].nonzero().tolist():
        log_p = logits[i, first + j - 1, :VOCAB].log_softmax(-1)
        want[i, j] = log_p[batch["input_ids"][i, first + j]]
        want_entropy[i, j] = -(log_p.exp() * log_p).sum()
    got = through_micro_batches(batch, logits, packed)
    torch.testing.assert_close(got["log_probs"], want)
    torch.testing.assert_close(got["entropy"], want_entropy)


def test_the_last_token_of_a_sentence_predicts_nothing_of_the_next() -> None:
    batch, logits = scene()
    want = through_micro_batches(batch, logits, packed=True)
    last = MASK.shape[1] - 1 - MASK.int().flip(1).argmax(dim=1)
    logits[range(len(MASK)), last] = 100 * torch.randn(len(MASK), PADDED)
    got = through_micro_batches(batch, logits, packed=True)
    assert torch.equal(got["log_probs"], want["log_probs"]) and torch.equal(got["entropy"], want["entropy"])


def test_without_samples_there_are_columns_without_rows() -> None:
    batch, _ = scene()
    empty = {name: value[:0] for name, value in batch.items()}
    micro_batches = make_micro_batches(empty, 1, MicroBatching())
    found = unpack_responses(micro_batches, [{"values": torch.ones(1)}], empty["response_mask"].shape)
    assert found["values"].shape == (0, RESPONSE)
