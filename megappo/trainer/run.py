"""How does a command become a run? `train` and `sft`: run folder, ranks, models, engine, the loop, the end."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.config.check import Plan
from megappo.config.schema import Config
from megappo.trainer.run_folder import open_run_folder

if TYPE_CHECKING:
    from megappo.controller.local_group import LocalWorkerGroup
    from megappo.data.load import Data
    from megappo.rewards.score import Scorer
    from megappo.rollout.engine import RolloutEngine
    from megappo.trainer.evaluate import Evaluation
    from megappo.trainer.workers import WeightPublisher

Drive = Callable[[Plan, Path, "Data", "LocalWorkerGroup", "RolloutEngine | None", "Scorer | None", "WeightPublisher"], None]


def train(plan: Plan) -> int:
    """PPO. Returns the exit code; raises UserError or RunFailed with the first cause."""
    roles = ["actor", "critic", *(["reference"] if plan.config.reference.enabled else [])]
    return _run(plan, roles, _drive_ppo, has_engine=True)


def sft(plan: Plan) -> int:
    """The supervised warm start. Returns the exit code; raises UserError or RunFailed with the first cause."""
    return _run(plan, ["actor"], _drive_sft, has_engine=plan.config.sft.evaluate_every > 0)


def _run(plan: Plan, roles: list[str], drive: Drive, has_engine: bool) -> int:
    from megappo.controller.launch import launch_local
    from megappo.controller.rendezvous import detect_launcher

    config = plan.config
    run_dir = Path(config.run.dir) / config.run.name
    if detect_launcher(config.run.launcher, os.environ) == "torchrun":
        if os.environ["RANK"] == "0":
            open_run_folder(run_dir, config)
        return _rank(plan, roles, run_dir, drive, has_engine)
    open_run_folder(run_dir, config)
    entry = functools.partial(_rank, plan, roles, run_dir, drive, has_engine)
    return launch_local(plan.world_size, entry, run_dir, threads=config.run.threads_per_rank, preload=_preload)


def _preload() -> None:
    """Import once what all ranks need, so that they are forked ready."""
    from megappo.parallel_state.device import import_megatron

    import_megatron()
    importlib.import_module("megappo.trainer.workers")


def _rank(plan: Plan, roles: list[str], run_dir: Path, drive: Drive, has_engine: bool) -> int:
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
    config = plan.config
    torch.set_num_threads(config.run.threads_per_rank)
    rank, world_size, store = join_world(os.environ)
    engine: RolloutEngine | None = None
    scorer: Scorer | None = None
    with Watchdog(store, rank, world_size, run_dir, config.run.watchdog_s) as watchdog:
        try:
            if rank == 0 and has_engine:  # first, so that the engine starts while the models load
                engine = make_engine(config, config.model.path, log_path=run_dir / "logs" / "engine.log", device=device().type)
            if rank == 0:  # before the models, so that a row or a reward that cannot be used ends the run at once
                with watchdog.phase("load data"):
                    data = load_data(config)
                if has_engine:
                    with watchdog.phase("load rewards"):
                        scorer = Scorer(config.reward, run_dir / "logs" / "reward.log")
            with watchdog.phase("build models"):
                start_world(store, rank, world_size)
                from megappo.trainer.workers import build_worker

                models = build_worker(plan, roles)
            if rank > 0:
                serve(models.worker, watchdog)
            else:
                layouts = {role: plan.layouts[role] for role in roles}
                with LocalWorkerGroup(layouts, models.worker, watchdog) as workers, watchdog.phase("driving the run"):
                    drive(plan, run_dir, data, workers, engine, scorer, models.publisher)
        finally:
            if scorer is not None:
                scorer.close()
            if engine is not None:
                engine.close()
        dist.destroy_process_group()
    return 0


def _drive_ppo(
    plan: Plan,
    run_dir: Path,
    data: Data,
    workers: LocalWorkerGroup,
    engine: RolloutEngine | None,
    scorer: Scorer | None,
    publisher: WeightPublisher,
) -> None:
    """The whole training run, on rank 0."""
    from megappo.data.stream import PromptStream
    from megappo.observe.progress import Progress
    from megappo.observe.rollouts import write_rollouts
    from megappo.observe.summary import summary_lines
    from megappo.observe.trackers import open_trackers
    from megappo.trainer.export import check_start, export_published
    from megappo.trainer.ppo import PPO, timed
    from megappo.trainer.rollout import to_rows

    assert engine is not None and scorer is not None
    config, steps = plan.config, plan.config.trainer.steps
    evaluation = _evaluation(config, data, scorer)
    prompts = PromptStream(data.train, config.run.seed, config.data.shuffle, config.data.weights)
    ppo = PPO(config, workers, engine, publisher, data.tokenizer, prompts, scorer)
    ppo.publish(version=0)
    check_start(publisher, config)

    def validate(step: int) -> dict[str, float]:
        assert evaluation is not None
        found = evaluation.run(engine, step)
        write_rollouts(run_dir / "validation", step, found.rows())
        return found.metrics()

    before = after = validate(step=0)["validation/accuracy"] if evaluation else None
    rewards = []
    trackers = open_trackers(run_dir, config.run.trackers)
    try:
        with Progress(steps) as progress:
            for step in range(1, steps + 1):
                metrics = ppo.step(step)
                if evaluation and (step == steps or _every(step, config.trainer.validate_every)):
                    with timed(metrics, "validate"):
                        metrics |= validate(step)
                    after = metrics["validation/accuracy"]
                if _every(step, config.trainer.save_every):
                    with timed(metrics, "save"):
                        workers.call("checkpoint", "save", folder=str(run_dir / "checkpoints"), step=step)
                write_rollouts(run_dir / "rollouts", step, to_rows(ppo.samples, ppo.scores))
                trackers.log(step, metrics)
                progress.update(step, metrics)
                rewards.append(metrics["reward/mean"])
    finally:
        trackers.close()
    export_published(run_dir / "final", publisher, config)
    for line in summary_lines(rewards, before, after):
        print(line, flush=True)  # noqa: T201 - the result of the command, for scripts


def _drive_sft(
    plan: Plan,
    run_dir: Path,
    data: Data,
    workers: LocalWorkerGroup,
    engine: RolloutEngine | None,
    scorer: Scorer | None,
    publisher: WeightPublisher,
) -> None:
    """The whole warm start, on rank 0. Without an engine nothing is evaluated."""
    from megappo.trainer.sft import warm_start

    evaluation = _evaluation(plan.config, data, scorer) if scorer else None
    warm_start(plan.config, workers, engine, publisher, data.tokenizer, data.train, evaluation)


def _evaluation(config: Config, data: Data, scorer: Scorer) -> Evaluation | None:
    """The evaluation, where there are validation rows."""
    from megappo.trainer.evaluate import Evaluation

    if data.validation is None:
        return None
    return Evaluation(config, data.validation, data.tokenizer, scorer)


def _every(step: int, period: int) -> bool:
    return period > 0 and step % period == 0
