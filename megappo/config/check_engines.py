"""Which ranks have an engine, and can they? `rollout.engines` on ranks that train, or on ranks of their own. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megappo.config.resolve import Command
from megappo.config.schema import Config


def engine_ranks(config: Config, training_ranks: int, command: Command) -> tuple[int, ...]:
    """The rank of each engine, ascending. Ranks that only generate come after those that train; else the engines are spread
    evenly over the ranks, so that each host of several has its own. None where the command starts no engine on a rank."""
    if not _generates(config, command):
        return ()
    count = config.rollout.engines
    if config.rollout.own_ranks:
        return tuple(range(training_ranks, training_ranks + count))
    return tuple(k * (training_ranks // count) for k in range(count))


def engine_problems(config: Config, training_ranks: int | None, command: Command) -> Iterator[str]:
    """training_ranks: None where they are not known."""
    rollout = config.rollout
    if command == "eval":
        if rollout.engines > 1:
            yield f"rollout.engines={rollout.engines}, but an evaluation has one engine; set rollout.engines=1"
        if rollout.own_ranks:
            yield "rollout.own_ranks=true, but an evaluation is one process and has no ranks; set rollout.own_ranks=false"
    elif (
        _generates(config, command) and training_ranks is not None and rollout.engines > training_ranks and not rollout.own_ranks
    ):
        yield (
            f"rollout.engines={rollout.engines} is more than the {training_ranks} ranks that train, of which each has one at "
            f"most; use at most {training_ranks}, or rollout.own_ranks=true"
        )


def _generates(config: Config, command: Command) -> bool:
    """Whether the command's ranks start engines."""
    return command == "train" or (command == "sft" and config.sft.evaluate_every > 0)
