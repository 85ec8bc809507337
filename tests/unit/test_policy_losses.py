"""Are clip-higher, dual clip, GSPO, CISPO and the terms beside them what their papers say, in value and gradient?

The reference works token by token in float64 and takes gradients by finite differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from megappo.algorithms.aggregation import loss_weights
from megappo.algorithms.losses import cispo_loss, entropy_loss, gspo_loss, kl_loss, ppo_clip_loss

NAN, INF = float("nan"), float("inf")
LOW, HIGH, DUAL = 0.2, 0.3, 3.0

Tokens = list[list[float]]


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo_by_hand(new: Tokens, old: Tokens, advantages: Tokens, dual: float | None = DUAL) -> float:
    total = 0.0
    for row in range(len(new)):
        for t in range(len(new[row])):
            ratio, a = math.exp(new[row][t] - old[row][t]), advantages[row][t]
            objective = min(ratio * a, clip(ratio, 1 - LOW, 1 + HIGH) * a)
            total -= max(objective, dual * a) if a < 0 and dual else objective
    return total


def gspo_by_hand(new: Tokens, old: Tokens, advantages: Tokens) -> float:
    """Mean over the sequences of equation 5: the advantage is one of the sequence."""
    total = 0.0
    for row in range(len(new)):
        ratio = math.exp(sum(n - o for n, o in zip(new[row], old[row], strict=True)) / len(new[row]))
        a = advantages[row][0]
        total -= min(ratio * a, clip(ratio, 1 - LOW, 1 + HIGH) * a)
    return total / len(new)


def gradient_by_hand(loss: Callable[[Tokens], float], new: Tokens, eps: float = 1e-6) -> Tokens:
    gradient = [[0.0] * len(row) for row in new]
    for i, row in enumerate(new):
        for t, at in enumerate(row):
            row[t] = at + eps
            above = loss(new)
            row[t] = at - eps
            gradient[i][t] = (above - loss(new)) / (2 * eps)
            row[t] = at
    return gradient


def samples(seed: int, one_advantage_a_row: bool = False) -> tuple[Tokens, Tokens, Tokens, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 4, 6, 3, 5]
    old = [(-torch.rand(n, generator=generator) * 3).tolist() for n in lengths]
    new = [[o + d for o, d in zip(row, (torch.randn(len(row), generator=generator)).tolist(), strict=True)] for row in old]
    advantages = [torch.randn(n, generator=generator).tolist() for n in lengths]
    if one_advantage_a_row:
        advantages = [[row[0]] * len(row) for row in advantages]
    return new, old, advantages, torch.arange(6) < torch.tensor(lengths)[:, None]


def padded(rows: Tokens, garbage: float, width: int = 6) -> torch.Tensor:
    return torch.tensor([row + [garbage] * (width - len(row)) for row in rows])


def check(loss: torch.Tensor, leaf: torch.Tensor, wanted: float, gradient: Tokens) -> None:
    assert loss.item() == pytest.approx(wanted, rel=2e-5, abs=1e-6)
    loss.backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, padded(gradient, 0.0), atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("garbage", [0.0, NAN, -INF])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dual", [None, DUAL])
def test_two_clip_ranges_and_dual_clip_equal_a_float64_loop(seed: int, garbage: float, dual: float | None) -> None:
    new, old, advantages, mask = samples(seed)
    leaf = padded(new, garbage).requires_grad_()
    loss, sums = ppo_clip_loss(leaf, padded(old, garbage), padded(advantages, garbage), mask, LOW, HIGH, dual)
    check(
        loss,
        leaf,
        ppo_by_hand(new, old, advantages, dual),
        gradient_by_hand(lambda x: ppo_by_hand(x, old, advantages, dual), new),
    )
    assert all(math.isfinite(value.item()) for value in sums.values())


@pytest.mark.parametrize(
    "ratio, advantage, loss, clipped, dual",
    [
        (1.25, 1.0, -1.25, 0, 0),  # inside the wider upper range
        (2.0, 1.0, -1.28, 1, 0),
        (0.5, -1.0, 0.8, 1, 0),  # the lower range is its own
        (2.0, -1.0, 2.0, 0, 0),
        (5.0, -1.0, 3.0, 0, 1),  # bounded by c = 3
        (5.0, -0.5, 1.5, 0, 1),
        (5.0, 1.0, -1.28, 1, 0),  # never for a positive advantage
    ],
)
def test_known_clips(ratio: float, advantage: float, loss: float, clipped: int, dual: int) -> None:
    new, one = torch.tensor([math.log(ratio)], requires_grad=True), torch.ones(1, dtype=torch.bool)
    found, sums = ppo_clip_loss(new, torch.zeros(1), torch.tensor([advantage]), one, 0.2, 0.28, dual_clip=3.0)
    assert found.item() == pytest.approx(loss, rel=1e-6)
    assert (sums["clipfrac"].item(), sums["dual_clipfrac"].item()) == (clipped, dual)
    found.backward()
    assert new.grad is not None
    assert bool(new.grad == 0) == bool(clipped or dual)


@pytest.mark.parametrize("garbage", [0.0, NAN, -INF])
@pytest.mark.parametrize("seed", range(3))
def test_gspo_equals_the_sequence_objective_in_float64(seed: int, garbage: float) -> None:
    new, old, advantages, mask = samples(seed, one_advantage_a_row=True)
    leaf = padded(new, garbage).requires_grad_()
    rows = torch.arange(len(new))[:, None].expand_as(mask)
    columns = loss_weights(mask, "seq_mean_token_mean")
    total, _ = gspo_loss(leaf, padded(old, garbage), padded(advantages, garbage), mask, rows, LOW, HIGH, columns.weight)
    loss = total / columns.share.sum()
    check(loss, leaf, gspo_by_hand(new, old, advantages), gradient_by_hand(lambda x: gspo_by_hand(x, old, advantages), new))


def test_gspo_of_a_known_sequence() -> None:
    # log ratios .2 and .4: s = exp(.3) = 1.349859, above 1.2; approx_kl is of the tokens' own ratios
    new, mask = torch.tensor([0.2, 0.4, 9.0], requires_grad=True), torch.tensor([True, True, False])
    for advantage, wanted, clipped in ((1.0, -2.4, 2.0), (-1.0, 2 * 1.349859, 0.0)):
        loss, sums = gspo_loss(new, torch.zeros(3), torch.full((3,), advantage), mask, torch.zeros(3, dtype=torch.long), 0.2)
        assert loss.item() == pytest.approx(wanted, rel=1e-6)
        assert sums["clipfrac"] == clipped
        assert sums["ratio"].item() == pytest.approx(2 * 1.349859, rel=1e-6)
        assert sums["approx_kl"].item() == pytest.approx(math.exp(0.2) - 1.2 + math.exp(0.4) - 1.4, rel=1e-5)


def test_gspo_keeps_interleaved_sequences_apart() -> None:
    """As in a packed micro-batch: one flat row of tokens, the sequence of each beside it."""
    new, old, advantages, mask = samples(5, one_advantage_a_row=True)
    rows = torch.arange(len(new))[:, None].expand_as(mask)
    wanted, sums = gspo_loss(padded(new, NAN), padded(old, NAN), padded(advantages, NAN), mask, rows, LOW, HIGH)
    order = torch.randperm(int(mask.sum()), generator=torch.Generator().manual_seed(0))
    flat = [x[mask][order] for x in (padded(new, NAN), padded(old, NAN), padded(advantages, NAN), mask)]
    found, flat_sums = gspo_loss(*flat, rows[mask][order] * 10 + 3, LOW, HIGH)
    torch.testing.assert_close(found, wanted)
    for key in sums:
        torch.testing.assert_close(flat_sums[key], sums[key])


@pytest.mark.parametrize("garbage", [0.0, NAN, -INF])
def test_cispo_weighs_every_token_and_clips_only_the_weight(garbage: float) -> None:
    new, old, advantages, mask = samples(1)
    leaf = padded(new, garbage).requires_grad_()
    loss, _ = cispo_loss(leaf, padded(old, garbage), padded(advantages, garbage), mask, LOW, HIGH)
    weights = [[clip(math.exp(n - o), 1 - LOW, 1 + HIGH) for n, o in zip(new[i], old[i], strict=True)] for i in range(len(new))]
    wanted = -sum(w * a * n for i in range(len(new)) for w, a, n in zip(weights[i], advantages[i], new[i], strict=True))
    gradient = [[-w * a for w, a in zip(weights[i], advantages[i], strict=True)] for i in range(len(new))]
    check(loss, leaf, wanted, gradient)
    assert all(x != 0 for row in gradient for x in row)


def test_cispo_of_known_tokens_without_a_lower_bound() -> None:
    new, old = torch.tensor([math.log(0.5), math.log(0.9)], requires_grad=True), torch.tensor([math.log(0.05), math.log(0.9)])
    loss, sums = cispo_loss(new, old, torch.tensor([1.0, -2.0]), torch.ones(2, dtype=torch.bool), 1.0, 2.0)
    loss.backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([-3.0, 2.0]))  # ratio 10 is cut to 3
    assert loss.item() == pytest.approx(-3 * math.log(0.5) + 2 * math.log(0.9), rel=1e-6)
    assert sums["clipfrac"] == 1.0


def ppo(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return ppo_clip_loss(new, old, advantages, mask, LOW, HIGH, DUAL)[0]


def gspo(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return gspo_loss(new, old, advantages, mask, torch.zeros(new.shape, dtype=torch.long), LOW)[0]


def cispo(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return cispo_loss(new, old, advantages, mask, LOW)[0]


@pytest.mark.parametrize("method", [ppo, gspo, cispo])
def test_an_unchanged_policy_has_the_gradient_minus_the_advantage(method: Callable[..., torch.Tensor]) -> None:
    new, advantages = torch.tensor([-0.3, -20.0, -1e-6], requires_grad=True), torch.tensor([1.0, -1.0, 3.0])
    method(new, new.detach(), advantages, torch.ones(3, dtype=torch.bool)).backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, -advantages, rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", [ppo, gspo, cispo])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_log_ratios_are_finite_in_value_and_gradient(method: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    new = torch.tensor([90.0, -90.0, 0.0], dtype=dtype, requires_grad=True)
    for sign in (1.0, -1.0):
        loss = method(new, torch.zeros(3, dtype=dtype), torch.full((3,), sign), torch.ones(3, dtype=torch.bool))
        loss.backward()
        assert loss.dtype == torch.float32
        assert math.isfinite(loss.item())
    assert new.grad is not None
    assert torch.isfinite(new.grad).all()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_loss_and_its_gradient_equal_the_formula(kind) -> None:
    log_ratios = [0.0, 0.1, -0.1, 2.0, -3.0]
    new = torch.tensor([x - 4.0 for x in log_ratios] + [NAN, -INF], requires_grad=True)
    ref = torch.tensor([-4.0] * 5 + [NAN, -INF])
    mask = torch.tensor([True] * 5 + [False] * 2)
    loss = kl_loss(new, ref, mask, kind, kl_coef=0.5)
    loss.backward()
    value = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}[kind]
    slope = {"k1": lambda d: 1.0, "k2": lambda d: d, "k3": lambda d: 1 - math.exp(-d)}[kind]
    assert loss.item() == pytest.approx(0.5 * sum(map(value, log_ratios)), rel=1e-5)
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([0.5 * slope(d) for d in log_ratios] + [0.0, 0.0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("log_ratio", [90.0, -90.0])
def test_the_kl_loss_is_finite_however_far_the_policy_is(kind, log_ratio: float) -> None:
    new = torch.tensor([log_ratio], requires_grad=True)
    loss = kl_loss(new, torch.zeros(1), torch.ones(1, dtype=torch.bool), kind, 0.01)
    loss.backward()
    assert new.grad is not None
    assert math.isfinite(loss.item()) and math.isfinite(new.grad.item())


def test_a_k3_loss_pulls_towards_the_reference_and_a_k1_loss_nowhere() -> None:
    """The mean gradient with respect to the logits, over all tokens of a small vocabulary weighted by the policy."""
    torch.manual_seed(0)
    logits, ref = torch.randn(5, requires_grad=True), torch.randn(5).log_softmax(-1)
    means = {}
    for kind in ("k1", "k2", "k3"):
        log_probs = logits.log_softmax(-1)
        weights = log_probs.exp().detach()
        loss = kl_loss(log_probs, ref, torch.ones(5, dtype=torch.bool), kind, 1.0, weights)  # type: ignore[arg-type]
        (means[kind],) = torch.autograd.grad(loss, logits)
    log_probs = logits.log_softmax(-1)
    (reverse,) = torch.autograd.grad((log_probs.exp() * (log_probs - ref)).sum(), logits)
    log_probs = logits.log_softmax(-1)
    (forward,) = torch.autograd.grad((ref.exp() * (ref - log_probs)).sum(), logits)
    torch.testing.assert_close(means["k1"], torch.zeros(5), atol=1e-6, rtol=0)
    torch.testing.assert_close(means["k2"], reverse, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(means["k3"], forward, atol=1e-6, rtol=1e-5)


def test_the_entropy_bonus_rewards_entropy_at_valid_tokens() -> None:
    entropy, mask = torch.tensor([1.0, 2.0, NAN], requires_grad=True), torch.tensor([True, True, False])
    loss, plain = entropy_loss(entropy, mask, 0.1, torch.tensor([1.0, 0.5, NAN]))
    loss.backward()
    assert plain == 3.0
    assert loss.item() == pytest.approx(-0.2)
    assert entropy.grad is not None
    torch.testing.assert_close(entropy.grad, torch.tensor([-0.1, -0.05, 0.0]))


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length"])
@pytest.mark.parametrize("split", [[5], [1, 1, 1, 1, 1], [2, 0, 3], [4, 1]])
def test_no_split_changes_loss_or_gradient(mode, split: list[int]) -> None:
    """Micro-batches of any size, some of them empty, each padded to another width, over any ranks."""
    new, old, advantages, mask = samples(2)
    constant = 7 if mode == "constant_length" else None
    whole = padded(new, NAN).requires_grad_()
    token_loss = torch.stack(
        [
            torch.stack(
                [ppo(*(x[i, t : t + 1] for x in (whole, padded(old, NAN), padded(advantages, NAN), mask))) for t in range(6)]
            )
            for i in range(5)
        ]
    )
    lengths, per_row = mask.sum(1), (token_loss * mask).sum(1)
    wanted = {
        "token_mean": per_row.sum() / lengths.sum(),
        "seq_mean_token_sum": per_row.sum() / (lengths > 0).sum(),
        "seq_mean_token_mean": (per_row / lengths.clamp(min=1)).sum() / (lengths > 0).sum(),
        "constant_length": per_row.sum() / ((lengths > 0).sum() * 7),
    }[mode]
    wanted.backward()

    leaf = padded(new, NAN).requires_grad_()
    total, divisor, start = torch.zeros(()), 0, 0
    for number, size in enumerate(split):
        rows = slice(start, start + size)
        start += size
        extra = (0, number)  # padding
        pad = torch.nn.functional.pad
        part_mask = pad(mask[rows], extra, value=False)
        columns = loss_weights(part_mask, mode, constant)
        parts = [pad(x[rows], extra, value=NAN) for x in (leaf, padded(old, NAN), padded(advantages, NAN))]
        total = total + ppo_clip_loss(*parts, part_mask, LOW, HIGH, DUAL, columns.weight)[0]
        divisor += int(columns.share.sum())
    (total / divisor).backward()
    torch.testing.assert_close(total / divisor, wanted)
    assert leaf.grad is not None and whole.grad is not None
    torch.testing.assert_close(leaf.grad, whole.grad, rtol=1e-5, atol=1e-7)
