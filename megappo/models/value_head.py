"""What does a value model compute in place of logits? `ValueHead`, a scalar a token.

legend: n scored tokens, h hidden size
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """One scalar a token. `weight` is (1, h) as in Hugging Face's `score`; float32, replicated over tp."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=torch.float32))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden (n, h) -> values (n,) float32."""
        return nn.functional.linear(hidden.float(), self.weight).squeeze(-1)
