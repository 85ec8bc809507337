"""Is this optimizer step skipped? One answer on all ranks: local flags, which add up, and a decision from their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

SkipReason = Literal["no valid token", "loss not finite", "gradient not finite"]


def skip_flags(loss: Tensor, gradient_probe: Tensor, num_tokens: Tensor) -> Tensor:
    """(3,) float64 of one rank; add them over ALL ranks (dp, pp, tp), then ask `skip_reason`.

    loss: the local sum (0 off the last stage). gradient_probe: not finite where a gradient is not (a sum, a norm).
    num_tokens: valid tokens, counted once over the ranks or on each of them: only 0 matters.
    """
    bad = [(~torch.isfinite(x.detach())).any().double() for x in (loss, gradient_probe)]
    return torch.stack((num_tokens.detach().double().to(bad[0].device), *bad))


def skip_reason(flags: Sequence[float]) -> SkipReason | None:
    """Why the step must not change weights, optimizer or learning rate; None where it may. flags: the sum over all ranks."""
    num_tokens, bad_losses, bad_gradients = flags
    if num_tokens <= 0:
        return "no valid token"
    if bad_losses > 0:
        return "loss not finite"
    return "gradient not finite" if bad_gradients > 0 else None
