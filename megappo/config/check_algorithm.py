"""Do the algorithm's keys fit together? Contradictions are refused, and what hardly anyone wants is warned of. No torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from megappo.config.resolve import uses_critic
from megappo.config.schema import Config

log = logging.getLogger("megappo")

_COMPARING = ("grpo", "rloo", "reinforce_plus_plus_baseline")
"""Advantages that compare the responses to one prompt."""


def algorithm_problems(config: Config) -> Iterator[str]:
    """Pairs of keys of a training run that contradict each other."""
    yield from _group_problems(config)
    yield from _loss_problems(config)
    yield from _kl_problems(config)
    yield from _score_problems(config)
    if not uses_critic(config) and config.critic.warmup_steps:
        yield (
            f"critic.warmup_steps={config.critic.warmup_steps}, but algorithm.advantages={config.algorithm.advantages!r} has no "
            f"critic; use 0, or algorithm.advantages=gae"
        )


def _group_problems(config: Config) -> Iterator[str]:
    n, algorithm = config.rollout.n, config.algorithm
    if n >= 2:
        return
    if algorithm.advantages in _COMPARING:
        yield (
            f"algorithm.advantages={algorithm.advantages!r} compares responses to one prompt, and rollout.n={n}; use rollout.n=2 "
            f"or more, or algorithm.advantages=reinforce_plus_plus"
        )
    if algorithm.dynamic_sampling_rounds > 0:
        yield (
            f"algorithm.dynamic_sampling_rounds={algorithm.dynamic_sampling_rounds} looks for responses to one prompt that score "
            f"differently, and rollout.n={n}; use rollout.n=2 or more, or 0 rounds"
        )


def _loss_problems(config: Config) -> Iterator[str]:
    algorithm, importance = config.algorithm, config.algorithm.importance
    if algorithm.dual_clip is not None and algorithm.policy_loss != "ppo":
        yield (
            f"algorithm.dual_clip={algorithm.dual_clip} bounds the loss of policy_loss=ppo, and "
            f"algorithm.policy_loss={algorithm.policy_loss!r}; remove one of them"
        )
    if algorithm.loss_length is not None and algorithm.loss_aggregation != "constant_length":
        yield (
            f"algorithm.loss_length={algorithm.loss_length} goes with algorithm.loss_aggregation=constant_length, and it is "
            f"{algorithm.loss_aggregation!r}; remove one of them"
        )
    if importance.floor > 0 and importance.bound != "masked":
        yield (
            f"algorithm.importance.floor={importance.floor} goes with algorithm.importance.bound=masked, and it is "
            f"{importance.bound!r}; use floor=0 or bound=masked"
        )
    if importance.floor > importance.cap:
        yield (
            f"algorithm.importance.floor={importance.floor} is above algorithm.importance.cap={importance.cap}, so that no ratio "
            f"is between them; lower the floor"
        )


def _kl_problems(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    for key, value in (("kl_coef", algorithm.kl_coef), ("kl_loss_coef", algorithm.kl_loss_coef)):
        if value > 0 and config.reference.enabled is False:
            yield (
                f"algorithm.{key}={value} needs the reference, but reference.enabled=false; remove reference.enabled or set "
                f"algorithm.{key}=0"
            )
    if algorithm.kl_target is not None and algorithm.kl_coef == 0:
        yield (
            f"algorithm.kl_target={algorithm.kl_target} adapts algorithm.kl_coef, which is 0 and stays 0; give it a first value, "
            f"e.g. 0.1, or remove the target"
        )


def _score_problems(config: Config) -> Iterator[str]:
    buffer, longest = config.reward.overlong_buffer, config.rollout.max_new_tokens
    if buffer > longest:
        yield (
            f"reward.overlong_buffer={buffer} is longer than a response, rollout.max_new_tokens={longest}; use at most {longest}"
        )


def warn_of_algorithm(config: Config) -> None:
    """What runs, and is seldom meant."""
    algorithm = config.algorithm
    if algorithm.kl_coef > 0 and algorithm.kl_loss_coef > 0:
        log.warning(
            "algorithm.kl_coef=%g and algorithm.kl_loss_coef=%g: the KL to the reference counts in the reward and in the loss; "
            "set one of them to 0",
            algorithm.kl_coef,
            algorithm.kl_loss_coef,
        )
    if algorithm.kl_loss_coef > 0 and algorithm.kl_loss == "k1":
        log.warning("algorithm.kl_loss=k1 has a gradient of mean 0 and pulls nowhere; use k2 or k3")
    if algorithm.policy_loss == "gspo" and algorithm.loss_aggregation != "seq_mean_token_mean":
        log.warning(
            "algorithm.loss_aggregation=%s: GSPO's loss is a mean over responses; algorithm.loss_aggregation=seq_mean_token_mean "
            "is the published one",
            algorithm.loss_aggregation,
        )
