"""Which Adam does Megatron use where neither apex nor TransformerEngine is? `FusedAdam`, in torch's fused CPU kernel.

Megatron knows two kinds of Adam: torch's, which it drives parameter by parameter and whose state it can not reshard with the
distributed optimizer, and apex's, which keeps `step` in the parameter group. This one is of the second kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam (arXiv:1412.6980) with bias correction; decoupled weight decay (arXiv:1711.05101) where adam_w_mode.

    lr: learning rate. betas, eps: Adam's. weight_decay: per step, times lr where decoupled.
    Takes apex's other arguments and needs none of them.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: object,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._kernel = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step on every parameter that has a gradient."""
        assert closure is None, "megatron calls step() without a closure"
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            group["step"] = group.get("step", 0) + 1
            states = [self.state[p] for p in params]
            for param, state in zip(params, states, strict=True):
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
            step = torch.tensor(float(group["step"]))
            beta1, beta2 = group["betas"]
            self._kernel(
                params,
                [p.grad for p in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [step] * len(params),
                lr=float(group["lr"]),
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=None,
                found_inf=None,
            )
