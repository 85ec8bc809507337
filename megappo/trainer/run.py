"""How does a command become a run? `train` and `sft`: run folder, ranks, models, engine, the loop, the end."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from megappo.config.check import Plan
from megappo.config.resolve import uses_critic
from megappo.trainer.run_folder import open_run_folder

if TYPE_CHECKING:
    from megappo.controller.watchdog import Watchdog
    from megappo.controller.worker import WorkerGroup
    from megappo.pp_weights.delivery import Lead
    from megappo.rollout.engine import RolloutEngine
    from megappo.trainer.roles import WeightPublisher


def train(plan: Plan) -> int:
    """PPO. Returns the exit code; raises UserError or RunFailed with the first cause."""
    config = plan.config
    roles = ("actor", *(("critic",) if uses_critic(config) else ()), *(("reference",) if config.reference.enabled else ()))
    return _run(Job(plan, "drive_ppo", roles))


def sft(plan: Plan) -> int:
    """The supervised warm start. Returns the exit code; raises UserError or RunFailed with the first cause."""
    return _run(Job(plan, "drive_sft", ("actor",)))


@dataclass(frozen=True)
class Job:
    """What the ranks are started for. drive: the function of trainer/drive.py that rank 0 runs, by name, since importing it
    takes seconds. roles: the models."""

    plan: Plan
    drive: Literal["drive_ppo", "drive_sft"]
    roles: tuple[str, ...]

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
    importlib.import_module("megappo.pp_weights.line_copy")  # compiles, where no run has done so before


def _rank(job: Job) -> int:
    """One rank's life: join the world, start this rank's engine, then train or only generate."""
    import torch

    from megappo.controller.rendezvous import join_world
    from megappo.controller.watchdog import Watchdog

    run = job.plan.config.run
    torch.set_num_threads(run.threads_per_rank)
    rank, world_size, store = join_world(os.environ)
    trains = rank < job.plan.training_ranks
    if trains:
        _preload()
    with Watchdog(store, rank, world_size, job.run_dir, run.watchdog_s) as watchdog, _engine(job, rank) as engine:
        if engine is not None:
            watchdog.watch(engine.fault)
        if trains:
            _train(job, watchdog, engine)
        else:
            from megappo.trainer.engine_rank import serve_engine

            assert engine is not None, "what a rank that does not train is for"
            serve_engine(engine, watchdog)
    return 0


@contextlib.contextmanager
def _engine(job: Job, rank: int) -> Iterator[RolloutEngine | None]:
    """This rank's engine, if it has one. It starts before the models, so that both load at the same time."""
    plan = job.plan
    if rank not in plan.engine_ranks:
        yield None
        return
    from megappo.parallel_state.device import device
    from megappo.rollout.factory import engine_devices, make_engine

    number, on = plan.engine_ranks.index(rank), device().type
    own = engine_devices(rank, int(os.environ["LOCAL_RANK"]), plan.training_ranks, plan.config.rollout.tp)
    engine = make_engine(
        plan.config,
        plan.config.model.path,
        log_path=job.run_dir / "logs" / (f"engine_{number}.log" if number else "engine.log"),
        device=on,
        devices=own if on == "cuda" else None,
    )
    try:
        yield engine
    finally:
        engine.close()


def _train(job: Job, watchdog: Watchdog, engine: RolloutEngine | None) -> None:
    """Load the data (rank 0), build the models, then drive (rank 0) or serve."""
    import torch.distributed as dist

    from megappo.controller.local_group import LocalWorkerGroup, serve
    from megappo.data.load import load_data
    from megappo.parallel_state.device import start_world
    from megappo.rewards.score import Scorer

    plan, config, rank = job.plan, job.plan.config, watchdog.rank
    with contextlib.ExitStack() as stack:
        scorer: Scorer | None = None
        if rank == 0:  # before the models, so that a row or a reward that cannot be used ends the run at once
            with watchdog.phase("load data"):
                data = load_data(config)
            if plan.engine_ranks:
                with watchdog.phase("load rewards"):
                    scorer = stack.enter_context(Scorer(config.reward, job.run_dir / "logs" / "reward.log"))
        with watchdog.phase("build models"):
            start_world(watchdog.store, rank, plan.training_ranks)
            from megappo.trainer.workers import build_worker

            models = build_worker(plan, job.roles, engine)
        with watchdog.phase("meet the engines"):
            lead = stack.enter_context(_delivery(plan, watchdog, models.publisher, engine))
        if rank > 0:
            serve(models.worker, watchdog)
        else:
            from megappo.trainer import drive

            layouts = {role: plan.layouts[role] for role in job.roles}
            ranks = _ranks_of_roles(plan, models.worker.roles)
            with LocalWorkerGroup(layouts, models.worker, watchdog, ranks=ranks) as workers, watchdog.phase("driving the run"):
                used = engine if lead is None else _group(plan, workers, lead)
                driver = drive.Driver(plan, job.run_dir, data, workers, models.publisher, used, scorer)
                getattr(drive, job.drive)(driver)
    dist.destroy_process_group()


def _ranks_of_roles(plan: Plan, roles: Iterable[str]) -> dict[str, Sequence[int]]:
    """Every role lives on the ranks that train, but for engines and for what engines need."""
    training = range(plan.training_ranks)
    everyone = range(plan.world_size)
    return {**dict.fromkeys(roles, training), "weights": everyone, "engine": plan.engine_ranks}


@contextlib.contextmanager
def _delivery(plan: Plan, watchdog: Watchdog, publisher: WeightPublisher, engine: RolloutEngine | None) -> Iterator[Lead | None]:
    """This rank's part in bringing weights to engines on other ranks than 0. All ranks that train or have an engine call it or
    `engine_rank.serve_engine`. Gives the lead, on rank 0 where there are such engines."""
    from megappo.pp_weights.delivery import Follow, Lead

    followers = [rank for rank in plan.engine_ranks if rank != 0]
    if watchdog.rank == 0 and followers:
        layout, buckets = publisher.manager.update(version=0), publisher.manager.buckets
        lead = Lead(watchdog.store, followers, layout, buckets, engine, plan.config.pp_weights.to_engines, watchdog.check)
        publisher.around = lead.update
        with contextlib.closing(lead):
            yield lead
    elif watchdog.rank in followers:
        assert engine is not None, "this rank is one of engine_ranks"
        follow = Follow(watchdog.store, watchdog.rank, engine, watchdog.check)
        publisher.receivers = [follow]
        with contextlib.closing(follow):
            yield None
    else:
        yield None


def _group(plan: Plan, workers: WorkerGroup, lead: Lead) -> RolloutEngine:
    """All engines as one, for the driver."""
    from megappo.rollout.factory import engine_limits
    from megappo.rollout.group import EngineGroup

    return EngineGroup(workers, len(plan.engine_ranks), engine_limits(plan.config, plan.config.model.path), lead)
