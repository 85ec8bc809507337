"""Which columns does the actor learn from? `update_columns`: what the driver sends and the loss reads. No torch."""

from __future__ import annotations

from megappo.config.schema_learning import AlgorithmConfig


def update_columns(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """Names of the (b, r) columns of a mini-batch, besides the inputs."""
    columns: tuple[str, ...] = ("old_log_probs", "advantages", "loss_weight", "share")
    columns += ("importance",) if algorithm.importance.bound != "none" else ()
    return columns + (("ref_log_probs",) if algorithm.kl_loss_coef > 0 else ())
