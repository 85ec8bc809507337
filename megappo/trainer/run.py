"""How does a command become a run? `train` and `sft`: run folder, ranks, models, engine, the loop, the end."""

from __future__ import annotations

import functools
import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megappo.config.check import Plan
from megappo.trainer.run_folder import open_run_folder

if TYPE_CHECKING:
    from megappo.rewards.score import Scorer
    from megappo.rollout.engine import RolloutEngine


def train(plan: Plan) -> int:
    """PPO. Returns the exit code; raises UserError or RunFailed with the first cause."""
    roles = ("actor", "critic", *(("reference",) if plan.config.reference.enabled else ()))
    return _run(Job(plan, "drive_ppo", roles, has_engine=True))


def sft(plan: Plan) -> int:
    """The supervised warm start. Returns the exit code; raises UserError or RunFailed with the first cause."""
    return _run(Job(plan, "drive_sft", ("actor",), has_engine=plan.config.sft.evaluate_every > 0))


@dataclass(frozen=True)
class Job:
    """What the ranks are started for. drive: the function of trainer/drive.py that rank 0 runs, by name, since importing it
    takes seconds. roles: the models."""

    plan: Plan
    drive: Literal["drive_ppo", "drive_sft"]
    roles: tuple[str, ...]
    has_engine: bool

    @property
    def run_dir(self) -> Path:
        return Path(self.plan.config.run.dir) / self.plan.config.run.name


def _run(job: Job) -> int:
    from megappo.controller.launch import run_on_ranks, speaks_for_all

    config = job.plan.config
    if speaks_for_all(config.run):
        open_run_folder(job.run_dir, config)
    return run_on_ranks(config.run, job.plan.world_size, functools.partial(_rank, job), job.run_dir, _preload)


def _preload() -> None:
    """Import once what all ranks need, so that they are forked ready."""
    from megappo.parallel_state.device import import_megatron

    import_megatron()
    importlib.import_module("megappo.trainer.workers")


def _rank(job: Job) -> int:
    """One rank's life: join the world, load the data (rank 0), build the models, then drive (rank 0) or serve."""
    import torch
    import torch.distributed as dist

    from megappo.controller.local_group import LocalWorkerGroup, serve
    from megappo.controller.rendezvous import join_world
    from megappo.controller.watchdog import Watchdog
    from megappo.data.load import load_data
    from megappo.parallel_state.device import device, start_world
    from megappo.rewards.score import Scorer
    from megappo.rollout.factory import make_engine

    _preload()
    config, run_dir, roles = job.plan.config, job.run_dir, job.roles
    torch.set_num_threads(config.run.threads_per_rank)
    rank, world_size, store = join_world(os.environ)
    engine: RolloutEngine | None = None
    scorer: Scorer | None = None
    with Watchdog(store, rank, world_size, run_dir, config.run.watchdog_s) as watchdog:
        try:
            if rank == 0 and job.has_engine:  # first, so that the engine starts while the models load
                engine = make_engine(config, config.model.path, log_path=run_dir / "logs" / "engine.log", device=device().type)
            if rank == 0:  # before the models, so that a row or a reward that cannot be used ends the run at once
                with watchdog.phase("load data"):
                    data = load_data(config)
                if job.has_engine:
                    with watchdog.phase("load rewards"):
                        scorer = Scorer(config.reward, run_dir / "logs" / "reward.log")
            with watchdog.phase("build models"):
                start_world(store, rank, world_size)
                from megappo.trainer.workers import build_worker

                models = build_worker(job.plan, roles)
            if rank > 0:
                serve(models.worker, watchdog)
            else:
                from megappo.trainer import drive

                layouts = {role: job.plan.layouts[role] for role in roles}
                with LocalWorkerGroup(layouts, models.worker, watchdog) as workers, watchdog.phase("driving the run"):
                    driver = drive.Driver(config, run_dir, data, workers, models.publisher, engine, scorer)
                    getattr(drive, job.drive)(driver)
        finally:
            if scorer is not None:
                scorer.close()
            if engine is not None:
                engine.close()
        dist.destroy_process_group()
    return 0
