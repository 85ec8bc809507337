"""Are the numbers possible? Ranges of single keys, and the arithmetic of batches. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

from megappo.config.check_algorithm import algorithm_problems
from megappo.config.resolve import Command, uses_critic
from megappo.config.schema import Config, SftConfig
from megappo.config.schema_models import UpdateConfig

_Range = tuple[str, Callable[[float], bool], tuple[str, ...]]

_COMMON: tuple[_Range, ...] = (
    ("at least 1", lambda v: v >= 1, ("run.threads_per_rank", "data.task_size", "rollout.tp", "rollout.max_num_seqs")),
    ("at least 1", lambda v: v >= 1, ("rollout.max_prompt_tokens", "rollout.max_new_tokens", "rollout.kv_cache_bytes")),
    ("at least 1", lambda v: v >= 1, ("rollout.threads", "rollout.engines", "eval.max_rows", "reward.workers")),
    ("at least 0", lambda v: v >= 0, ("run.seed", "pp_weights.verify_every")),
    ("more than 0", lambda v: v > 0, ("run.watchdog_s", "reward.timeout_s")),
)
_UPDATE: tuple[_Range, ...] = (
    ("at least 1", lambda v: v >= 1, ("mini_batch_size", "micro_batch_size", "epochs")),
    ("at least 1", lambda v: v >= 1, ("micro_batch_tokens", "score_micro_batch_tokens")),
    ("more than 0", lambda v: v > 0, ("optimizer.lr", "optimizer.eps")),
    ("at least 0", lambda v: v >= 0, ("optimizer.warmup_steps", "optimizer.weight_decay", "optimizer.clip_grad")),
    ("between 0 and 1", lambda v: 0 <= v <= 1, ("optimizer.min_lr_ratio",)),
)
_TRAIN: tuple[_Range, ...] = (
    ("at least 1", lambda v: v >= 1, ("trainer.steps", "trainer.batch_size", "rollout.n")),
    ("at least 0", lambda v: v >= 0, ("trainer.validate_every", "trainer.save_every")),
    ("at least 1", lambda v: v >= 1, ("trainer.max_skips", "algorithm.loss_length")),
    ("at least 0", lambda v: v >= 0, ("algorithm.kl_coef", "algorithm.kl_loss_coef", "actor.entropy_coef")),
    ("at least 0", lambda v: v >= 0, ("algorithm.dynamic_sampling_rounds", "critic.warmup_steps", "reward.overlong_buffer")),
    ("at least 0", lambda v: v >= 0, ("algorithm.importance.floor", "reward.overlong_penalty")),
    ("more than 0", lambda v: v > 0, ("algorithm.clip_range", "algorithm.clip_range_high", "algorithm.kl_target")),
    ("more than 0", lambda v: v > 0, ("algorithm.kl_gain", "algorithm.importance.cap", "reward.scale", "reward.clip")),
    ("more than 0", lambda v: v > 0, ("rollout.logprob_tolerance", "critic.value_clip_range")),
    ("more than 1", lambda v: v > 1, ("algorithm.dual_clip",)),
    ("between 0 and 1", lambda v: 0 <= v <= 1, ("algorithm.gamma", "algorithm.gae_lambda")),
    ("more than 0 and at most 1", lambda v: 0 < v <= 1, ("rollout.top_p", "rollout.gpu_memory_utilization")),
    ("-1 (off) or at least 1", lambda v: v == -1 or v >= 1, ("rollout.top_k",)),
)
_EVAL: tuple[_Range, ...] = (
    ("at least 0", lambda v: v >= 0, ("eval.samples",)),
    ("more than 0", lambda v: v > 0, ("eval.temperature",)),
    ("more than 0 and at most 1", lambda v: 0 < v <= 1, ("eval.top_p",)),
    ("-1 (off) or at least 1", lambda v: v == -1 or v >= 1, ("eval.top_k",)),
)
_SFT: tuple[_Range, ...] = (
    ("at least 1", lambda v: v >= 1, ("sft.steps", "sft.batch_size")),
    ("at least 0", lambda v: v >= 0, ("sft.evaluate_every",)),
    ("more than 0 and at most 1", lambda v: 0 < v <= 1, ("sft.stop_at_accuracy", "sft.max_accuracy")),
)
_OF_COMMAND: dict[Command, tuple[_Range, ...]] = {"train": _TRAIN + _EVAL, "sft": _SFT, "eval": _EVAL, "import": ()}


def trained_roles(config: Config, command: Command) -> tuple[str, ...]:
    """The models that the command trains."""
    return {"train": ("actor", *(("critic",) if uses_critic(config) else ())), "sft": ("actor",)}.get(command, ())


def range_problems(config: Config, command: Command) -> Iterator[str]:
    """Single values out of their range, and pairs of keys that contradict each other."""
    roles = trained_roles(config, command)
    ranges = _COMMON + _OF_COMMAND[command]
    ranges += tuple((text, holds, tuple(f"{role}.{key}" for key in keys)) for role in roles for text, holds, keys in _UPDATE)
    for text, holds, keys in ranges:
        for key in keys:
            value = attrgetter(key)(config)
            if value is not None and not holds(value):  # what is not given has no range
                yield f"{key}={value} must be {text}"
    for role in roles:
        yield from _optimizer_problems(role, getattr(config, role))
    if roles:
        yield from _greedy_problems(config.rollout.temperature)
    name = config.run.name
    if not name or name in (".", "..") or "/" in name:
        yield f"run.name={name!r} is the name of a folder inside run.dir; use a plain name without '/'"
    if command == "train":
        yield from algorithm_problems(config)
    if command == "sft":
        yield from _never_measured(config.sft)


def _greedy_problems(temperature: float) -> Iterator[str]:
    if temperature <= 0:
        yield (
            f"rollout.temperature={temperature} has no log-probs to train on (it is greedy); use a value above 0, "
            f"e.g. 1.0 (validation is greedy anyway)"
        )


def _never_measured(sft: SftConfig) -> Iterator[str]:
    if (sft.stop_at_accuracy is not None or sft.max_accuracy is not None) and sft.evaluate_every == 0:
        yield "sft.evaluate_every=0 never measures what sft.stop_at_accuracy and sft.max_accuracy compare; set it, e.g. to 10"


def _optimizer_problems(role: str, section: UpdateConfig) -> Iterator[str]:
    optimizer, key = section.optimizer, f"{role}.optimizer"
    for i, beta in enumerate(optimizer.betas):
        if not 0 <= beta < 1:
            yield f"{key}.betas[{i}]={beta} must be at least 0 and less than 1"
    decay_steps = optimizer.decay_steps or 0
    if decay_steps < 1:
        yield f"{key}.decay_steps={decay_steps} must be at least 1"
    elif optimizer.warmup_steps >= decay_steps:
        yield (
            f"{key}.warmup_steps={optimizer.warmup_steps} must be less than {key}.decay_steps={decay_steps}; "
            f"lower warmup_steps or raise decay_steps"
        )


def batch_problems(config: Config, dp_of: Mapping[str, int], command: Command) -> Iterator[str]:
    """Batches that cannot be cut: samples of a step into mini-batches, mini-batches over the data-parallel ranks, micro-batches.

    dp_of: data-parallel degree of each role. The number of micro-batches is no concern here: the trainer rounds it up to what the
    schedule needs.
    """
    longest = config.rollout.max_prompt_tokens + config.rollout.max_new_tokens
    for role, section in (("actor", config.actor), ("critic", config.critic)):
        if role not in dp_of:
            continue  # its layout is refused, or the command has no such role
        budgets = {"micro_batch_tokens": section.micro_batch_tokens, "score_micro_batch_tokens": section.score_micro_batch_tokens}
        for key, budget in budgets.items():
            if budget is None or budget >= longest or (key != "micro_batch_tokens" and budget == section.micro_batch_tokens):
                continue  # what it has from the other key is said once
            yield (
                f"{role}.{key}={budget} does not hold one sample of up to {longest} tokens "
                f"(rollout.max_prompt_tokens + rollout.max_new_tokens); use at least {longest}"
            )
        if command == "train":
            yield from _mini_batch_problems(config, role, section, dp_of[role])
        elif config.sft.batch_size % dp_of[role]:
            size, dp = config.sft.batch_size, dp_of[role]
            yield f"sft.batch_size={size} is not a multiple of {role}.parallel.dp={dp}; use {_multiples(size, dp)}"


def _mini_batch_problems(config: Config, role: str, section: UpdateConfig, dp: int) -> Iterator[str]:
    prompts, n, mini, micro = config.trainer.batch_size, config.rollout.n, section.mini_batch_size, section.micro_batch_size
    samples = prompts * n
    if samples < 1 or mini < 1:
        return  # out of range, and said so
    made_of = f"trainer.batch_size={prompts} x rollout.n={n} = {samples} samples"
    if samples % dp:
        yield f"{made_of} cannot be split over {role}.parallel.dp={dp}; make trainer.batch_size {_multiples(prompts, dp)}"
        return
    fits = [size for size in range(dp, samples + 1, dp) if samples % size == 0]
    if mini not in fits:
        near = [max((s for s in fits if s < mini), default=0), min((s for s in fits if s > mini), default=0)]
        why = f"is more than {made_of}" if mini > samples else f"does not divide {made_of}"
        if samples % mini == 0:
            why = f"is not a multiple of {role}.parallel.dp={dp}"
        yield f"{role}.mini_batch_size={mini} {why}; use {' or '.join(str(s) for s in near if s)}"
    elif section.micro_batch_tokens is None and micro * dp > mini:
        yield (
            f"{role}.micro_batch_size={micro} is more than a rank's part of {role}.mini_batch_size={mini} "
            f"(dp={dp}: {mini // dp} samples); use at most {mini // dp}"
        )


def _multiples(value: int, of: int) -> str:
    below = value // of * of
    return " or ".join(str(v) for v in (below, below + of) if v)
