"""Which functions make up the reward, and under which names? `reward_parts`: `reward.function`, or `reward.parts`. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megappo.config.schema_learning import RewardConfig
from megappo.rewards.functions import IN_DRIVER


@dataclass(frozen=True)
class Part:
    """One function of the reward. key: where the config names it, e.g. `reward.parts[1].function`."""

    key: str
    function: str
    weight: float
    name: str

    @property
    def in_driver(self) -> bool:
        return self.function in IN_DRIVER

    @property
    def shown(self) -> str:
        """As messages name it: `reward.function='mine.py:score'`."""
        return f"{self.key}={self.function!r}"


def reward_parts(config: RewardConfig) -> list[Part]:
    """The parts in the config's order. Without `reward.parts` the one function is the whole reward."""
    if not config.parts:
        return [Part("reward.function", config.function, 1.0, _short(config.function))]
    parts = []
    for i, part in enumerate(config.parts):
        name = _short(part.function) if part.name is None else part.name
        parts.append(Part(f"reward.parts[{i}].function", part.function, part.weight, name))
    return parts


def _short(function: str) -> str:
    return function.rpartition(":")[2]
