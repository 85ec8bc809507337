"""What does a rank do that only generates? It has an engine, follows every update of the weights, and serves. No Megatron."""

from __future__ import annotations

from megappo.controller.colocate import create_colocated_worker
from megappo.controller.dispatch import Dispatch, dispatched
from megappo.controller.local_group import serve
from megappo.controller.watchdog import Watchdog
from megappo.pp_weights.delivery import Follow
from megappo.rollout.engine import RolloutEngine
from megappo.rollout.group import EngineOnRank


class WeightTaker:
    """The role `weights` where there are none to send: the other side of `trainer.roles.WeightPublisher`."""

    def __init__(self, follow: Follow) -> None:
        self._follow = follow

    @dispatched(Dispatch.ALL)
    def publish(self, version: int, verify: bool) -> None:
        """Take the version that the lead announces, into this rank's engine."""
        self._follow.take()

    @dispatched(Dispatch.ALL)
    def export(self, folder: str, config_from: str) -> None:
        """Nothing: only the ranks that train have something to write."""


def serve_engine(engine: RolloutEngine, watchdog: Watchdog) -> None:
    """This rank's life, until the driver says stop."""
    with watchdog.phase("waiting for the models"):
        follow = Follow(watchdog.store, watchdog.rank, engine, watchdog.check)
    try:
        serve(create_colocated_worker({"engine": EngineOnRank(engine), "weights": WeightTaker(follow)}), watchdog)
    finally:
        follow.close()
