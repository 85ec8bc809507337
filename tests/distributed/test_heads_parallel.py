"""Do ranks that share the vocabulary find what one process finds? Values on every rank, gradients, padding, extremes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megappo.models import hidden_log_probs, softmax_blocks
from megappo.models.hidden_log_probs import log_probs_and_entropy_from_hidden
from megappo.models.vocab_parallel import VocabularyShard, vocab_parallel_log_probs_and_entropy
from tests.pool import Pool

pytestmark = pytest.mark.distributed

TOKENS, HIDDEN, VOCAB = 19, 8, 1003
TEMPERATURE = 0.7


def scene(padded: int) -> tuple[torch.Tensor, ...]:
    """hidden, weight with +50 or NaN in its padded rows, labels, weights of both results."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator) * 3
    weight = torch.randn(padded, HIDDEN, generator=generator)
    weight[VOCAB:] = 50.0
    weight[-1] = torch.nan
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[:3] = torch.tensor([0, VOCAB - 1, padded // 2])
    return hidden, weight, labels, torch.randn(2, TOKENS, generator=generator)


def on_ranks(padded: int, kernel: str) -> dict[str, Any]:
    if kernel == "torch":
        softmax_blocks._compiled, kept = lambda block: False, softmax_blocks._compiled
    rows, elements = hidden_log_probs._TILE_ROWS["cpu"], hidden_log_probs._TILE_ELEMENTS["cpu"]
    hidden_log_probs._TILE_ROWS["cpu"], hidden_log_probs._TILE_ELEMENTS["cpu"] = 8, 8 * 37
    rank, world = dist.get_rank(), dist.get_world_size()
    hidden, weight, labels, weights = scene(padded)
    own = slice(rank * padded // world, (rank + 1) * padded // world)
    vocabulary = VocabularyShard(VOCAB, rank, dist.group.WORLD)
    try:
        logits = (hidden @ weight[own].T).requires_grad_()
        results = vocab_parallel_log_probs_and_entropy(logits, labels, vocabulary, temperature=TEMPERATURE)
        grad = torch.autograd.grad(results, logits, list(weights))[0]
        hidden.requires_grad_()
        part = weight[own].clone().requires_grad_()
        from_hidden = log_probs_and_entropy_from_hidden(hidden, part, labels, vocabulary, temperature=TEMPERATURE)
        grads = torch.autograd.grad(from_hidden, (hidden, part), list(weights))
    finally:
        hidden_log_probs._TILE_ROWS["cpu"], hidden_log_probs._TILE_ELEMENTS["cpu"] = rows, elements
        if kernel == "torch":
            softmax_blocks._compiled = kept
    return {
        "logits": [x.detach() for x in (*results, grad)],
        "hidden": [x.detach() for x in (*from_hidden, *grads)],
    }


@pytest.mark.parametrize("kernel", ["numba", "torch"])
# 1200 over 4: the last rank holds padding from its column 103 on; 1340: nothing but padding
@pytest.mark.parametrize("world, padded", [(2, 1024), (4, 1200), (4, 1340)])
def test_ranks_that_share_the_vocabulary_agree_with_one_process(pool: Pool, world: int, padded: int, kernel: str) -> None:
    hidden, weight, labels, weights = (x.double() if x.is_floating_point() else x for x in scene(padded))
    hidden.requires_grad_()
    weight = weight[:VOCAB].requires_grad_()
    logits = hidden @ weight.T
    log_p = (logits / TEMPERATURE).log_softmax(-1)
    want = [log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)]
    grad_logits, grad_hidden, grad_weight = torch.autograd.grad(want, (logits, hidden, weight), list(weights))

    found = pool.run(world, on_ranks, padded, kernel)

    def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(got.double(), wanted.detach(), rtol=1e-5, atol=1e-5)

    for rank in found:
        for path in ("logits", "hidden"):
            for got, wanted, first in zip(rank[path][:2], want, found[0][path], strict=False):
                close(got, wanted)
                assert torch.equal(got, first), "not the same bits on every rank"
        close(rank["hidden"][2], grad_hidden)
    whole = torch.cat([rank["logits"][2] for rank in found], dim=1)
    close(whole[:, :VOCAB], grad_logits)
    assert not whole[:, VOCAB:].any()
    whole = torch.cat([rank["hidden"][3] for rank in found])
    close(whole[:VOCAB], grad_weight)
    assert not whole[VOCAB:].any()


def one_rank_without_a_chance() -> list[list[float]]:
    """Token 0 has -inf on all of rank 1; token 1 the extremes on both; token 2 a NaN on rank 1."""
    rank = dist.get_rank()
    inf, nan = float("inf"), float("nan")
    parts = [
        torch.tensor([[0.0, 0.0], [1e4, -1e4], [0.0, 0.0]]),
        torch.tensor([[-inf, -inf], [1e4, -1e4], [nan, 0.0]]),
    ]
    logits = parts[rank].requires_grad_()
    results = vocab_parallel_log_probs_and_entropy(logits, torch.tensor([1, 2, 0]), VocabularyShard(4, rank, dist.group.WORLD))
    grad = torch.autograd.grad([x[:2] for x in results], logits, [torch.ones(2)] * 2)[0]
    return [*(x.tolist() for x in results), *grad[:2].tolist()]


def test_extremes_and_nan_on_one_rank_reach_all(pool: Pool) -> None:
    half = 0.6931472
    for rank, (log_probs, entropy, *grad) in enumerate(pool.run(2, one_rank_without_a_chance)):
        assert log_probs[:2] == pytest.approx([-half, -half]) and entropy[:2] == pytest.approx([half, half])
        assert log_probs[2] != log_probs[2] and entropy[2] != entropy[2]
        assert grad[0] == pytest.approx([-0.5, 0.5] if rank == 0 else [0.0, 0.0])
        assert grad[1] == pytest.approx([-0.5, 0.0] if rank == 0 else [0.5, 0.0])
