"""What is the learning rate at a step? `lr_scheduler`, Megatron's scheduler as the config wants it."""

from __future__ import annotations

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megappo.config.schema_models import OptimizerConfig


def lr_scheduler(optimizer: MegatronOptimizer, config: OptimizerConfig) -> OptimizerParamScheduler:
    """Sets the learning rate of the optimizer's parameters at each step s = 1, 2 ... of the run. With w warm-up steps, the end d
    of the decay, high = lr, low = min_lr_ratio * lr and p = (s - w) / (d - w):

        s <= w           high * s / w
        w < s <= d       constant: high
                         linear:   low + (high - low) * (1 - p)
                         cosine:   low + (high - low) * (1 + cos(pi * p)) / 2     (arXiv:1608.03983, equation 5, one period)
        s > d            low, at `constant` high: the cosine does not rise again

    Weight decay is the same at every step. config: resolved, so that decay_steps is a number above warmup_steps.
    """
    assert config.decay_steps is not None, "resolved"
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.lr * config.min_lr_ratio,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=config.decay_steps,
        lr_decay_style=config.decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
