"""What does a key that the user left open stand for? `resolve`: the one place where defaults follow from other keys. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, TypeVar

from megappo.config.schema import Config
from megappo.config.schema_learning import AlgorithmConfig
from megappo.config.schema_models import UpdateConfig
from megappo.models.shape import checkpoint_folder, hf_files

Command = Literal["train", "sft", "eval", "import"]
U = TypeVar("U", bound=UpdateConfig)

_MANDATORY: dict[Command, tuple[str, ...]] = {
    "train": ("model.path", "data.train"),
    "sft": ("model.path", "data.train", "sft.output"),
    "eval": ("model.path", "data.validation"),
    "import": ("model.path",),
}


def mandatory_keys(command: Command) -> tuple[str, ...]:
    """Keys without a default that the command needs."""
    return _MANDATORY[command]


def uses_critic(config: Config) -> bool:
    """Whether training has a value model: the other advantages need none."""
    return config.algorithm.advantages == "gae"


def resolve(config: Config, command: Command = "train") -> Config:
    """The config with every open key filled in, so that all who read it see final values. Resolving twice changes nothing."""
    model, rollout, reference = config.model, config.rollout, config.reference
    layout = config.actor.parallel
    engine_dtype = rollout.dtype or model.dtype
    both_float32 = engine_dtype == model.dtype == "float32"
    tolerance = rollout.logprob_tolerance if rollout.logprob_tolerance is not None else 1e-3 if both_float32 else 5e-2
    uses_reference = config.algorithm.kl_coef != 0 or config.algorithm.kl_loss_coef != 0
    enabled = reference.enabled if reference.enabled is not None else uses_reference
    last_step = config.sft.steps if command == "sft" else config.trainer.steps
    return replace(
        config,
        model=replace(model, tokenizer=model.tokenizer or _files_of(model.path)),
        algorithm=_resolved(config.algorithm, rollout.max_new_tokens),
        actor=_with_defaults(config.actor, last_step),
        critic=replace(
            _with_defaults(config.critic, last_step),
            parallel=config.critic.parallel or layout,
            path=config.critic.path or model.path,
        ),
        reference=replace(reference, enabled=enabled, parallel=reference.parallel or layout, path=reference.path or model.path),
        rollout=replace(rollout, dtype=engine_dtype, logprob_tolerance=tolerance),
    )


def _files_of(path: str) -> str:
    """Where the tokenizer of a model path lies: in the folder itself, or inside a checkpoint."""
    return path if checkpoint_folder(path) is None else str(hf_files(path))


def _resolved(algorithm: AlgorithmConfig, max_new_tokens: int) -> AlgorithmConfig:
    whiten, aggregation, length = algorithm.whiten_advantages, algorithm.loss_aggregation, algorithm.loss_length
    if whiten is None:
        whiten = algorithm.advantages in ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
    if aggregation is None:
        aggregation = "seq_mean_token_mean" if algorithm.policy_loss == "gspo" else "token_mean"
    if length is None and aggregation == "constant_length":
        length = max_new_tokens
    return replace(algorithm, whiten_advantages=whiten, loss_aggregation=aggregation, loss_length=length)


def _with_defaults(section: U, last_step: int) -> U:
    optimizer, budget = section.optimizer, section.score_micro_batch_tokens
    budget = section.micro_batch_tokens if budget is None else budget
    # A run that is shorter than its warm-up ends within it; the decay still comes after.
    decay_steps = optimizer.decay_steps if optimizer.decay_steps is not None else max(last_step, optimizer.warmup_steps + 1)
    return replace(section, optimizer=replace(optimizer, decay_steps=decay_steps), score_micro_batch_tokens=budget)
