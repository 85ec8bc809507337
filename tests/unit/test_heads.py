"""Vocabulary-parallel log-probs and entropy on one rank, against plain torch in float64. (Over ranks: tests/distributed.)"""

from __future__ import annotations

import pytest
import torch

from megappo.models import heads
from megappo.models.heads import ValueHead, vocab_parallel_log_probs_and_entropy


def plain(logits: torch.Tensor, labels: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (logits.double() / temperature).log_softmax(-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1 << 22, 200])
def test_values_and_gradients_equal_plain_torch(monkeypatch: pytest.MonkeyPatch, temperature: float, chunk: int) -> None:
    monkeypatch.setattr(heads, "_CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    logits = (torch.randn(33, 61) * 4).requires_grad_()
    reference = logits.detach().double().requires_grad_()
    labels = torch.randint(0, 61, (33,))
    weights = torch.randn(2, 33)
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, labels, vocab_size=61, temperature=temperature)
    want, want_entropy = plain(reference, labels, temperature)
    torch.testing.assert_close(log_probs, want.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, want_entropy.float(), atol=1e-5, rtol=1e-5)
    (log_probs * weights[0] + entropy * weights[1]).sum().backward()
    (want * weights[0] + want_entropy * weights[1]).sum().backward()
    torch.testing.assert_close(logits.grad, reference.grad.float(), atol=1e-5, rtol=1e-5)


def test_padded_columns_never_count() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 64)
    labels = torch.randint(0, 61, (5,))
    want = vocab_parallel_log_probs_and_entropy(logits[:, :61], labels, vocab_size=61)
    logits[:, 61:] = 50.0
    got = vocab_parallel_log_probs_and_entropy(logits, labels, vocab_size=61)
    torch.testing.assert_close(got, want)


def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.randn(5, 8)
    before = logits.clone()
    vocab_parallel_log_probs_and_entropy(logits, torch.tensor([0, 1, 2, 3, 4]), vocab_size=8)
    assert torch.equal(logits, before)


def test_a_certain_token_has_log_prob_zero_and_no_entropy() -> None:
    logits = torch.tensor([[1000.0, -1000.0, 0.0]])
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, torch.tensor([0]), vocab_size=3)
    assert log_probs.tolist() == [0.0] and entropy.tolist() == [0.0]


def test_a_new_value_head_says_zero() -> None:
    assert ValueHead(4)(torch.randn(3, 4)).tolist() == [0.0, 0.0, 0.0]
