"""What do log-probs and entropies cost? Of 155 MB of logits beside verl's path, and of hidden states beside matmuls.

    python -m benchmarks.algorithms_heads FILE    the measurements, as JSON; `rows` makes rows of them

One process, one thread, forward and backward. Both ways must give what float64 and a plain log_softmax give, before anything is
measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.memory import free_at_once, peak
from benchmarks.parts import Found
from benchmarks.peers import optional, verl, versions
from benchmarks.report import Row, beside, over, row
from benchmarks.timing import contest
from megappo.models.hidden_log_probs import log_probs_and_entropy_from_hidden
from megappo.models.vocab_parallel import VocabularyShard, vocab_parallel_log_probs_and_entropy

NUM_TOKENS, VOCAB_SIZE, HIDDEN_SIZE = 256, 151_936, 512  # float32 logits: 155 MB
ROUNDS, MATMUL_ROUNDS = 9, 7
MB = 1e6


def rows(found: Found) -> list[Row]:
    logits, hidden = found["logits"], found["hidden"]
    seconds, most = hidden["seconds"], hidden["bytes"]
    return [
        beside("logprob_entropy_vs_verl", logits["seconds"], "verl", 3),
        over("logprob_entropy_memory_over_logits", logits["extra_bytes"] / MB, "MB", logits["bytes"] / MB, at_most=0.05),
        over("hidden_forward_over_matmul", seconds["forward"] * 1e3, "ms", seconds["matmul"] * 1e3, at_most=2),
        over("hidden_all_over_matmuls", seconds["all"] * 1e3, "ms", seconds["matmuls"] * 1e3, at_most=2),
        row("hidden_memory_vs_logits", most["ours"] / MB, "MB", most["plain"] / MB, min_ratio=20),
    ]


def of_logits(labels: torch.Tensor, weights: list[torch.Tensor]) -> Found:
    """extra_bytes: beside logits and their gradient; where the gradient is written over the logits, beside these."""
    logits = (torch.randn(NUM_TOKENS, VOCAB_SIZE) * 2).requires_grad_()

    def ours(overwrite: bool = False) -> list[torch.Tensor]:
        results = vocab_parallel_log_probs_and_entropy(logits, labels, VocabularyShard(VOCAB_SIZE), overwrite_logits=overwrite)
        return [*results, *torch.autograd.grad(results, logits, weights)]

    wanted = in_float64(logits.detach(), labels, weights)
    check(ours(), wanted)
    contestants: dict[str, Callable[[], object]] = {"ours": ours}
    log_probs_and_entropy = optional(verl, verl.load_heads)
    if log_probs_and_entropy is not None:
        peers = logits.detach().clone().requires_grad_()

        def verls() -> list[torch.Tensor]:
            results = log_probs_and_entropy(peers.view_as(peers), labels)
            return [*results, *torch.autograd.grad(results, peers, weights)]

        check(verls(), wanted)
        contestants["peer"] = verls
    del wanted
    seconds = contest(contestants, ROUNDS)
    known = (logits, labels, *weights)
    extra = max(peak(ours, known) - logits.nbytes, peak(lambda: ours(overwrite=True), known))
    return {"seconds": seconds, "extra_bytes": extra, "bytes": logits.nbytes}


def of_hidden_states(labels: torch.Tensor, weights: list[torch.Tensor]) -> Found:
    """bytes: beside the gradients that both ways give."""
    hidden = (torch.randn(NUM_TOKENS, HIDDEN_SIZE) * 0.3).requires_grad_()
    weight = (torch.randn(VOCAB_SIZE, HIDDEN_SIZE) * 0.3).requires_grad_()

    def ours() -> list[torch.Tensor]:
        results = log_probs_and_entropy_from_hidden(hidden, weight, labels, VocabularyShard(VOCAB_SIZE))
        return [*results, *torch.autograd.grad(results, (hidden, weight), weights)]

    def plain() -> list[torch.Tensor]:
        results = log_softmax_results(hidden @ weight.T, labels)
        return [*results, *torch.autograd.grad(results, (hidden, weight), weights)]

    check(ours(), plain())
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
        log_probs_and_entropy_from_hidden(hidden, weight, labels, VocabularyShard(VOCAB_SIZE))

    contestants: dict[str, Callable[[], object]] = {"forward": forward, "matmul": matmul, "all": ours, "matmuls": matmuls}
    seconds = contest(contestants, MATMUL_ROUNDS, warm_up=1)
    known, gradients = (hidden, weight, labels, *weights), hidden.nbytes + weight.nbytes
    return {"seconds": seconds, "bytes": {"ours": peak(ours, known) - gradients, "plain": peak(plain, known) - gradients}}


def log_softmax_results(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def in_float64(logits: torch.Tensor, labels: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    wide = logits.double().requires_grad_()
    results = log_softmax_results(wide, labels)
    return [*results, *torch.autograd.grad(results, wide, [w.double() for w in weights])]


def check(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm(), "not the same results"


def measure() -> Found:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    free_at_once()
    labels, weights = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,)), list(torch.randn(2, NUM_TOKENS))
    return {"logits": of_logits(labels, weights), "hidden": of_hidden_states(labels, weights), "peers": versions}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(measure()))
