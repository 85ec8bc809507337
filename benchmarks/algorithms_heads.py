"""What do log-probs and entropies cost? Of 155 MB of logits beside verl's path, and of hidden states beside matmuls.

python -m benchmarks.algorithms_heads
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.report import Row, over, row, table
from benchmarks.timing import contest
from benchmarks.weights_memory import LiveStorages
from megappo.models.heads import vocab_parallel_log_probs_and_entropy
from megappo.models.hidden_log_probs import log_probs_and_entropy_from_hidden

NUM_TOKENS, VOCAB_SIZE, HIDDEN_SIZE = 256, 151_936, 512  # float32 logits: 155 MB
ROUNDS, MATMUL_ROUNDS = 9, 5
MB = 1 << 20


def rows() -> list[Row]:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    labels, weights = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,)), list(torch.randn(2, NUM_TOKENS))
    return [*logits_rows(labels, weights), *hidden_rows(labels, weights)]


def logits_rows(labels: torch.Tensor, weights: list[torch.Tensor]) -> list[Row]:
    logits = torch.randn(NUM_TOKENS, VOCAB_SIZE) * 2
    leaf = logits.clone().requires_grad_()

    def ours(overwrite: bool = False) -> list[torch.Tensor]:
        results = vocab_parallel_log_probs_and_entropy(leaf, labels, vocab_size=VOCAB_SIZE, overwrite_logits=overwrite)
        return [*results, *torch.autograd.grad(results, leaf, weights)]

    check(ours(), plain(logits, labels, weights))
    contestants: dict[str, Callable[[], object]] = {"ours": ours}
    try:
        from benchmarks.peers import verl

        verl.load_heads()
    except ImportError as error:
        print(f"peer verl: skipped (not installed): {error}")
    else:
        peer = leaf.detach().clone().requires_grad_()

        def verls() -> list[torch.Tensor]:
            results = verl.log_probs_and_entropy(peer.view_as(peer), labels)
            return [*results, *torch.autograd.grad(results, peer, weights)]

        check(ours(), verls())
        contestants["verl"] = verls
    seconds = contest(contestants, ROUNDS)

    extra = peak(lambda: ours(), leaf, labels, *weights) - logits.nbytes  # the gradient, which autograd asks for
    extra = max(extra, peak(lambda: ours(overwrite=True), leaf, labels, *weights))
    return [
        row("logprob_entropy_vs_verl", seconds["ours"] * 1e3, "ms", seconds["verl"] * 1e3, min_ratio=3)
        if "verl" in seconds
        else row("logprob_entropy_vs_verl", seconds["ours"] * 1e3, "ms"),
        over("logprob_entropy_memory_over_logits", extra / MB, "MB", logits.nbytes / MB, at_most=0.05),
    ]


def hidden_rows(labels: torch.Tensor, weights: list[torch.Tensor]) -> list[Row]:
    hidden = (torch.randn(NUM_TOKENS, HIDDEN_SIZE) * 0.3).requires_grad_()
    weight = (torch.randn(VOCAB_SIZE, HIDDEN_SIZE) * 0.3).requires_grad_()

    def ours() -> list[torch.Tensor]:
        results = log_probs_and_entropy_from_hidden(hidden, weight, labels, vocab_size=VOCAB_SIZE)
        return [*results, *torch.autograd.grad(results, (hidden, weight), weights)]

    def plain_path() -> list[torch.Tensor]:
        results = log_softmax_results(hidden @ weight.T, labels)
        return [*results, *torch.autograd.grad(results, (hidden, weight), weights)]

    check(ours(), plain_path())
    gradients = hidden.nbytes + weight.nbytes
    known = (hidden, weight, labels, *weights)
    plain_bytes, our_bytes = (peak(path, *known) - gradients for path in (plain_path, ours))

    logits = torch.empty(NUM_TOKENS, VOCAB_SIZE)
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    @torch.no_grad()
    def matmul() -> None:
        torch.mm(hidden, weight.T, out=logits)

    @torch.no_grad()
    def matmuls() -> None:
        matmul()
        matmul()  # the backward pass multiplies once more rather than hold the result
        torch.mm(logits, weight, out=grad_hidden)
        torch.mm(logits.T, hidden, out=grad_weight)

    @torch.no_grad()
    def forward() -> None:
        log_probs_and_entropy_from_hidden(hidden, weight, labels, vocab_size=VOCAB_SIZE)

    contestants: dict[str, Callable[[], object]] = {"forward": forward, "matmul": matmul, "all": ours, "matmuls": matmuls}
    seconds = {name: value * 1e3 for name, value in contest(contestants, MATMUL_ROUNDS, warm_up=1).items()}
    return [
        over("hidden_forward_over_matmul", seconds["forward"], "ms", seconds["matmul"], at_most=2),
        over("hidden_all_over_matmuls", seconds["all"], "ms", seconds["matmuls"], at_most=2),
        row("hidden_memory_vs_logits", our_bytes / MB, "MB", plain_bytes / MB, min_ratio=20),
    ]


def log_softmax_results(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def plain(logits: torch.Tensor, labels: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    """In float64."""
    wide = logits.double().requires_grad_()
    results = log_softmax_results(wide, labels)
    return [*results, *torch.autograd.grad(results, wide, [w.double() for w in weights])]


def check(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm(), "not the same results"


def peak(run: Callable[[], Any], *known: torch.Tensor) -> int:
    """The most bytes in storages that were not there before, both passes."""
    with LiveStorages(known) as live:
        run()
    return live.peak


if __name__ == "__main__":
    print(table(rows()))
