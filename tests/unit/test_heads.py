"""Log-probs and entropies of logits and of hidden states on one rank, against plain torch in float64.

Over ranks: tests/distributed. Each runs twice: in the loops that numba compiles, and in torch's operations, which a GPU takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.memory import LiveStorages
from megappo.models import hidden_log_probs, softmax_blocks, vocab_parallel
from megappo.models.hidden_log_probs import log_probs_and_entropy_from_hidden, log_probs_from_hidden
from megappo.models.value_head import ValueHead
from megappo.models.vocab_parallel import (
    VocabularyShard,
    vocab_parallel_log_probs_and_entropy,
    vocab_parallel_log_probs_from_logits,
)


@pytest.fixture(params=["numba", "torch", "torch in chunks"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "numba":
        monkeypatch.setattr(softmax_blocks, "_compiled", lambda block: False)
    if request.param == "torch in chunks":
        monkeypatch.setattr(vocab_parallel, "_LARGEST_CHUNK", 200)
        monkeypatch.setattr(hidden_log_probs, "_CHUNK", 50)
    return str(request.param)


@pytest.fixture(params=["one tile", "tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "tiles":
        monkeypatch.setitem(hidden_log_probs._TILE_ROWS, "cpu", 10)
        monkeypatch.setitem(hidden_log_probs._TILE_ELEMENTS, "cpu", 10 * 17)


def plain(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    log_p = (logits.double() / temperature).log_softmax(-1)
    return log_p.gather(-1, labels[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def close(got: Tensor, want: Tensor, relative: float = 1e-5) -> None:
    """Element by element, and as a whole."""
    torch.testing.assert_close(got.double(), want.double(), atol=relative, rtol=relative)
    assert (got.double() - want).norm() <= relative * want.norm()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("width", [61, 5000])
def test_values_and_gradients_equal_plain_torch(path: str, temperature: float, width: int) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(33, width) * 4).requires_grad_()
    reference = logits.detach().double().requires_grad_()
    labels = torch.randint(0, width, (33,))
    weights = torch.randn(2, 33)
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, labels, VocabularyShard(width), temperature=temperature)
    want, want_entropy = plain(reference, labels, temperature)
    close(log_probs, want)
    close(entropy, want_entropy)
    (log_probs * weights[0] + entropy * weights[1]).sum().backward()
    (want * weights[0] + want_entropy * weights[1]).sum().backward()
    assert logits.grad is not None and reference.grad is not None
    close(logits.grad, reference.grad)


@pytest.mark.parametrize("which", [0, 1])
def test_the_gradient_of_either_result_alone(path: str, which: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 40, requires_grad=True)
    reference = logits.detach().double().requires_grad_()
    labels = torch.arange(7)
    vocab_parallel_log_probs_and_entropy(logits, labels, VocabularyShard(40))[which].sum().backward()
    plain(reference, labels)[which].sum().backward()
    assert logits.grad is not None and reference.grad is not None
    close(logits.grad, reference.grad)


def test_log_probs_without_entropy_are_the_same(path: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 3, 70, requires_grad=True)
    labels = torch.randint(0, 64, (4, 3))
    both, entropy = vocab_parallel_log_probs_and_entropy(logits, labels, VocabularyShard(64), temperature=0.7)
    alone = vocab_parallel_log_probs_from_logits(logits, labels, VocabularyShard(64), temperature=0.7)
    assert alone.shape == entropy.shape == (4, 3)
    assert torch.equal(alone, both)
    weights = torch.randn(4, 3)
    want = torch.autograd.grad(both, logits, weights)[0]
    assert torch.equal(torch.autograd.grad(alone, logits, weights)[0], want)


_COMPILED_SUMS = """
import numpy as np
from megappo.models import softmax_rows
x = np.random.default_rng(0).standard_normal(64 * 1000, dtype=np.float32)
for entropy in (False, True):
    sums = np.zeros((3, 64), dtype=np.float32)
    sums[0] = -np.inf
    softmax_rows.add_columns(x, 1000, 1000, np.float32(1.0), entropy, sums)
    print(sums.tobytes().hex())
"""


def test_the_process_that_compiles_the_loops_finds_the_bits_that_the_next_one_does(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", _COMPILED_SUMS]
    first, second = (subprocess.check_output(command, env=environment, cwd=Path(__file__).parents[2]) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_float32(path: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(20, 3000) * 4).to(dtype).requires_grad_()
    reference = logits.detach().double().requires_grad_()
    labels = torch.randint(0, 3000, (20,))
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, labels, VocabularyShard(3000))
    want, want_entropy = plain(reference, labels)
    assert log_probs.dtype == entropy.dtype == torch.float32
    close(log_probs, want)
    close(entropy, want_entropy)
    (log_probs.sum() - entropy.sum()).backward()
    (want.sum() - want_entropy.sum()).backward()
    assert logits.grad is not None and reference.grad is not None
    # rounded once, to the nearest number of the logits' dtype; float32's own error may tip a tie
    rounded = reference.grad.to(dtype)
    assert (logits.grad != rounded).float().mean() < 0.001
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(logits.grad.double(), reference.grad, rtol=step, atol=1e-7)


@pytest.mark.parametrize("padding", [50.0, float("nan"), float("inf")])
def test_padded_columns_never_count(path: str, padding: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 64)
    labels = torch.randint(0, 61, (5,))
    alone = logits[:, :61].clone().requires_grad_()
    want = vocab_parallel_log_probs_and_entropy(alone, labels, VocabularyShard(61))
    logits[:, 61:] = padding
    logits.requires_grad_()
    got = vocab_parallel_log_probs_and_entropy(logits, labels, VocabularyShard(61))
    torch.testing.assert_close(got, want)
    sum(want).sum().backward()  # type: ignore[union-attr]
    sum(got).sum().backward()  # type: ignore[union-attr]
    assert logits.grad is not None and alone.grad is not None
    torch.testing.assert_close(logits.grad[:, :61], alone.grad)
    assert not logits.grad[:, 61:].any()


def test_the_logits_are_left_as_they_were(path: str) -> None:
    logits = torch.randn(5, 8, requires_grad=True)
    before = logits.detach().clone()
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, torch.tensor([0, 1, 2, 3, 4]), VocabularyShard(8))
    (log_probs.sum() + entropy.sum()).backward()
    assert torch.equal(logits, before)


def test_logits_handed_over_become_their_gradient(path: str) -> None:
    torch.manual_seed(0)
    hidden, labels = torch.randn(9, 70, requires_grad=True), torch.arange(9)
    want = torch.autograd.grad(
        vocab_parallel_log_probs_and_entropy(hidden * 2, labels, VocabularyShard(61)), hidden, [torch.ones(9)] * 2
    )
    logits = hidden * 2
    results = vocab_parallel_log_probs_and_entropy(logits, labels, VocabularyShard(61), overwrite_logits=True)
    got = torch.autograd.grad(results, hidden, [torch.ones(9)] * 2, retain_graph=True)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(logits.detach() * 2, got[0])
    with pytest.raises(RuntimeError, match="overwritten by the first backward pass"):
        torch.autograd.grad(results, hidden, [torch.ones(9)] * 2)


def test_a_certain_token_has_log_prob_zero_and_no_entropy(path: str) -> None:
    logits = torch.tensor([[1000.0, -1000.0, 0.0]])
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, torch.tensor([0]), VocabularyShard(3))
    assert log_probs.tolist() == [0.0] and entropy.tolist() == [0.0]


def test_a_uniform_distribution_by_hand(path: str) -> None:
    logits = torch.zeros(1, 4, requires_grad=True)
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, torch.tensor([2]), VocabularyShard(4))
    assert log_probs.tolist() == pytest.approx([-1.3862944]) and entropy.tolist() == pytest.approx([1.3862944])
    log_probs.sum().backward()
    assert logits.grad is not None and logits.grad.tolist() == [[-0.25, -0.25, 0.75, -0.25]]


def test_extreme_logits_stay_finite(path: str) -> None:
    torch.manual_seed(0)
    logits = (torch.rand(16, 5000) * 2 - 1) * 1e4
    logits[0] = 1e4  # all alike
    logits[1] = -1e4
    logits[2, :4000] = -float("inf")  # whole blocks without a chance
    logits.requires_grad_()
    reference = logits.detach().double().requires_grad_()
    labels = torch.randint(4000, 5000, (16,))
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, labels, VocabularyShard(5000))
    want, want_entropy = plain(reference.clamp(min=-1e300), labels)
    torch.testing.assert_close(log_probs.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-5, atol=1e-5)
    (log_probs.sum() + entropy.sum()).backward()
    (want.sum() + want_entropy.sum()).backward()
    assert logits.grad is not None and reference.grad is not None
    close(logits.grad, reference.grad)


@pytest.mark.parametrize("poison", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("column", [0, 4999])
def test_nan_and_infinity_are_seen_in_their_row_alone(path: str, poison: float, column: int) -> None:
    logits = torch.randn(3, 5000)
    logits[1, column] = poison
    results = vocab_parallel_log_probs_and_entropy(logits, torch.tensor([1, 2, 3]), VocabularyShard(5000))
    for result in results:
        assert result.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("label", [-100, -1, 61, 64])
def test_a_label_outside_the_vocabulary_is_nan(path: str, label: int) -> None:
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(torch.randn(2, 64), torch.tensor([3, label]), VocabularyShard(61))
    assert log_probs.isnan().tolist() == [False, True]
    assert entropy.isfinite().all()


@pytest.mark.parametrize("shape", [(0, 8), (0, 3, 8)])
def test_no_token_is_no_result(path: str, shape: tuple[int, ...]) -> None:
    logits = torch.empty(shape, requires_grad=True)
    labels = torch.empty(shape[:-1], dtype=torch.int64)
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, labels, VocabularyShard(7))
    assert log_probs.shape == entropy.shape == shape[:-1]
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad is not None and logits.grad.shape == shape


def test_logits_with_gaps_between_their_rows_or_columns(path: str) -> None:
    torch.manual_seed(0)
    wide, labels = torch.randn(6, 100), torch.arange(6)
    for logits in (wide[:, 20:60], wide[:, ::2], wide[:40].T[:6], wide[:1].expand(6, 100)):
        count = logits.shape[1]
        if count < 6:
            labels = labels % count
        got = vocab_parallel_log_probs_and_entropy(logits, labels, VocabularyShard(count))
        torch.testing.assert_close(got, vocab_parallel_log_probs_and_entropy(logits.contiguous(), labels, VocabularyShard(count)))


def test_gradients_agree_with_differences() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 8, 3])
    assert torch.autograd.gradcheck(
        lambda x: vocab_parallel_log_probs_and_entropy(x, labels, VocabularyShard(9), temperature=0.7), (logits,)
    )


def test_gradients_from_hidden_states_agree_with_differences(tiles: None) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(12, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(41, 4, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 37, (12,))
    assert torch.autograd.gradcheck(
        lambda x, w: log_probs_and_entropy_from_hidden(x, w, labels, VocabularyShard(37), temperature=0.7), (hidden, weight)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_from_hidden_states_equal_those_from_their_logits(path: str, tiles: None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, 11, 16).to(dtype).requires_grad_(), torch.randn(64, 16).to(dtype).requires_grad_()
    labels, weights = torch.randint(0, 61, (3, 11)), torch.randn(2, 3, 11)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    got = log_probs_and_entropy_from_hidden(hidden, weight, labels, VocabularyShard(61), temperature=0.6)
    if dtype == torch.float32:
        wide = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
        want = plain((wide[0] @ wide[1].T)[..., :61], labels, 0.6)
    else:  # a matmul of other shape rounds other logits the other way
        wide = hidden, weight
        want = vocab_parallel_log_probs_and_entropy(hidden @ weight.T, labels, VocabularyShard(61), temperature=0.6)
    for one, other in zip(got, want, strict=True):
        close(one, other.double(), tolerance)
    grads = torch.autograd.grad(got, (hidden, weight), list(weights))
    for grad, expected in zip(
        grads, torch.autograd.grad(want, wide, [w.to(x.dtype) for w, x in zip(weights, want, strict=True)]), strict=True
    ):
        close(grad, expected.double(), tolerance)
    assert not grads[1][61:].any()
    torch.testing.assert_close(log_probs_from_hidden(hidden, weight, labels, VocabularyShard(61), temperature=0.6), got[0])


def test_hidden_states_and_weight_need_not_both_want_gradients(tiles: None) -> None:
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(12, 4), torch.randn(41, 4), torch.arange(12)
    pair = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    want = torch.autograd.grad(log_probs_from_hidden(*pair, labels, VocabularyShard(41)).sum(), pair)
    for which in (0, 1):
        pair = [hidden.clone(), weight.clone()]
        pair[which].requires_grad_()
        got = torch.autograd.grad(log_probs_from_hidden(*pair, labels, VocabularyShard(41)).sum(), pair[which])
        assert torch.equal(got[0], want[which])


def test_padded_rows_of_the_weight_and_no_token_are_harmless(path: str) -> None:
    weight = torch.randn(8, 4)
    weight[6:] = float("nan")
    weight.requires_grad_()
    hidden = torch.randn(5, 4, requires_grad=True)
    log_probs_from_hidden(hidden, weight, torch.arange(5), VocabularyShard(6)).sum().backward()
    assert weight.grad is not None and hidden.grad is not None
    assert weight.grad.isfinite().all() and hidden.grad.isfinite().all() and not weight.grad[6:].any()
    weight.grad = None
    none = torch.empty(0, 4, requires_grad=True)
    log_probs_from_hidden(none, weight, torch.empty(0, dtype=torch.int64), VocabularyShard(6)).sum().backward()
    assert weight.grad is not None and not weight.grad.any() and none.grad is not None


def peak(run: Callable[[], Any], *known: Tensor) -> int:
    with LiveStorages(known) as live:
        run()
    return live.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_memory_beside_the_logits_and_their_gradient_is_small(
    dtype: torch.dtype, overwrite: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(softmax_blocks, "_compiled", lambda block: False)
    logits = torch.randn(400, 20_000).to(dtype).requires_grad_()
    labels = torch.arange(400)

    def run() -> None:
        results = vocab_parallel_log_probs_and_entropy(logits, labels, VocabularyShard(20_000), overwrite_logits=overwrite)
        torch.autograd.grad(results, logits, [torch.ones(400)] * 2)

    run()
    gradient = 0 if overwrite else logits.nbytes
    assert 0 <= peak(run, logits, labels) - gradient <= 0.05 * logits.nbytes
    assert (
        peak(lambda: vocab_parallel_log_probs_and_entropy(logits, labels, VocabularyShard(20_000)), logits, labels)
        < 0.05 * logits.nbytes
    )


def test_hidden_states_never_meet_a_whole_block_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hidden_log_probs._TILE_ELEMENTS, "cpu", 1 << 16)
    hidden, weight = torch.randn(128, 8, requires_grad=True), torch.randn(32_000, 8, requires_grad=True)
    labels, ones = torch.arange(128), [torch.ones(128)] * 2

    def ours() -> None:
        torch.autograd.grad(
            log_probs_and_entropy_from_hidden(hidden, weight, labels, VocabularyShard(32_000)), (hidden, weight), ones
        )

    gradients = hidden.nbytes + weight.nbytes
    logits = 128 * 32_000 * 4
    assert 0 <= peak(ours, hidden, weight, labels) - gradients <= logits / 20


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: vocab_parallel_log_probs_from_logits(torch.ones(2, 4), torch.zeros(3, dtype=torch.int64), VocabularyShard(4)),
            "labels",
        ),
        (
            lambda: vocab_parallel_log_probs_from_logits(
                torch.ones(2, 4), torch.zeros(2, dtype=torch.int64), VocabularyShard(4), temperature=0.0
            ),
            "temperature=0.0",
        ),
        (
            lambda: log_probs_from_hidden(
                torch.ones(2, 4), torch.ones(5, 3), torch.zeros(2, dtype=torch.int64), VocabularyShard(5)
            ),
            "does not fit weight",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_new_value_head_says_zero() -> None:
    assert ValueHead(4)(torch.randn(3, 4)).tolist() == [0.0, 0.0, 0.0]
