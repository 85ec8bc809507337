"""Is the loss the mean that its name says, of the whole batch?"""

from __future__ import annotations

import pytest
import torch

from megappo.algorithms.aggregation import Aggregation, loss_weights

NAN = float("nan")
MASK = torch.tensor([[True, False, False, False], [False, True, True, True], [False, False, False, False]])
LOSS = torch.tensor([[2.0, NAN, NAN, NAN], [NAN, -1.0, 3.0, 4.0], [NAN, NAN, NAN, NAN]])


def mean(token_loss: torch.Tensor, mask: torch.Tensor, mode: Aggregation, constant: int | None = None) -> float:
    """What an optimizer step makes of the two columns: one sum, divided once."""
    weight, share = loss_weights(mask, mode, constant)
    return float(token_loss[mask] @ weight[mask]) / int(share.sum())


@pytest.mark.parametrize(
    "mode, constant, wanted",
    [
        ("token_mean", None, 8 / 4),
        ("seq_mean_token_sum", None, (2 + 6) / 2),  # the empty row is no sequence
        ("seq_mean_token_mean", None, (2 + 2) / 2),
        ("constant_length", 10, (2 + 6) / (2 * 10)),
    ],
)
def test_known_means(mode, constant: int | None, wanted: float) -> None:
    assert mean(LOSS, MASK, mode, constant) == pytest.approx(wanted)


def test_unequal_samples_of_opposite_loss_do_not_cancel() -> None:
    # lengths 1 and 3, token losses +1 and -1: -0.5 over all tokens, 0 as a mean of means
    loss, mask = torch.tensor([[1.0, NAN, NAN], [-1.0, -1.0, -1.0]]), torch.tensor([[True, False, False], [True, True, True]])
    assert mean(loss, mask, "token_mean") == -0.5
    assert mean(loss, mask, "seq_mean_token_mean") == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length"])
def test_padding_columns_and_rows_change_nothing(mode) -> None:
    constant = 6 if mode == "constant_length" else None
    wide = torch.nn.functional.pad
    loss, mask = wide(LOSS, (0, 10, 0, 2), value=NAN), wide(MASK, (0, 10, 0, 2), value=False)
    assert mean(loss, mask, mode, constant) == mean(LOSS, MASK, mode, constant)


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length"])
@pytest.mark.parametrize("rows", [0, 2])
def test_a_batch_without_tokens_has_no_weight_and_no_share(mode, rows: int) -> None:
    weight, share = loss_weights(torch.zeros(rows, 3, dtype=torch.bool), mode, 4 if mode == "constant_length" else None)
    assert weight.shape == share.shape == (rows, 3)
    assert (weight == 0).all() and (share == 0).all()


@pytest.mark.parametrize(
    "mode, constant, divisor", [("token_mean", None, 4), ("seq_mean_token_mean", None, 2), ("constant_length", 10, 20)]
)
def test_the_divisor_is_an_integer(mode, constant: int | None, divisor: int) -> None:
    weight, share = loss_weights(MASK, mode, constant)
    assert share.dtype == torch.int64
    assert share.sum() == divisor
    assert (share[~MASK] == 0).all() and (weight[~MASK] == 0).all()


def test_a_constant_length_goes_with_its_mode() -> None:
    for mode, constant in (("token_mean", 5), ("constant_length", None), ("constant_length", 0)):
        with pytest.raises(ValueError, match="constant_length goes with the mode"):
            loss_weights(MASK, mode, constant)  # type: ignore[arg-type]
