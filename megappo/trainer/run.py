"""How does a command become a run? `train` and `sft`: run folder, ranks, models, engine, the loop, the end."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from megappo.config.check import Plan
from megappo.config.load import dump_config
from megappo.config.schema import Config

if TYPE_CHECKING:
    from megappo.controller.local_group import LocalWorkerGroup
    from megappo.data.prompts import PromptRow
    from megappo.data.tokenizer import Tokenizer
    from megappo.rollout.engine import RolloutEngine
    from megappo.trainer.evaluate import Evaluation
    from megappo.trainer.workers import WeightPublisher

Drive = Callable[[Plan, Path, "LocalWorkerGroup", "RolloutEngine | None", "WeightPublisher"], None]


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
            _open_run_folder(run_dir, config)
        return _rank(plan, roles, run_dir, drive, has_engine)
    _open_run_folder(run_dir, config)
    entry = functools.partial(_rank, plan, roles, run_dir, drive, has_engine)
    return launch_local(plan.world_size, entry, run_dir, threads=config.run.threads_per_rank, preload=_preload)


def _preload() -> None:
    """Import once what all ranks need, so that they are forked ready."""
    from megappo.parallel_state.device import import_megatron

    import_megatron()
    importlib.import_module("megappo.trainer.workers")


def _open_run_folder(run_dir: Path, config: Config) -> None:
    """A new folder with the resolved config. One that is there already keeps its content under the next free number."""
    if (run_dir / "config.resolved.yaml").exists():
        number = 1
        while (older := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
            number += 1
        run_dir.rename(older)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.resolved.yaml").write_text(dump_config(config), encoding="utf-8")


def _rank(plan: Plan, roles: list[str], run_dir: Path, drive: Drive, has_engine: bool) -> int:
    """One rank's life: join the world, build the models, then drive (rank 0) or serve."""
    import torch
    import torch.distributed as dist

    from megappo.controller.local_group import LocalWorkerGroup, serve
    from megappo.controller.rendezvous import join_world
    from megappo.controller.watchdog import Watchdog
    from megappo.parallel_state.device import backend, device, prepare_device
    from megappo.rollout.factory import make_engine

    _preload()
    config = plan.config
    torch.set_num_threads(config.run.threads_per_rank)
    rank, world_size, store = join_world(os.environ)
    engine: RolloutEngine | None = None
    with Watchdog(store, rank, world_size, run_dir, config.run.watchdog_s) as watchdog:
        try:
            if rank == 0 and has_engine:  # first, so that the engine starts while the models load
                engine = make_engine(config, config.model.path, log_path=run_dir / "logs" / "engine.log", device=device().type)
            with watchdog.phase("build models"):
                prepare_device()
                dist.init_process_group(
                    backend(),
                    store=dist.PrefixStore("torch", store),  # type: ignore[attr-defined]
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(hours=1),  # the watchdog ends a stuck run long before
                )
                from megappo.trainer.workers import build_worker

                models = build_worker(plan, roles)
            if rank > 0:
                serve(models.worker, watchdog)
            else:
                layouts = {role: plan.layouts[role] for role in roles}
                with LocalWorkerGroup(layouts, models.worker, watchdog) as workers, watchdog.phase("driving the run"):
                    drive(plan, run_dir, workers, engine, models.publisher)
        finally:
            if engine is not None:
                engine.close()
        dist.destroy_process_group()
    return 0


def _drive_ppo(
    plan: Plan, run_dir: Path, workers: LocalWorkerGroup, engine: RolloutEngine | None, publisher: WeightPublisher
) -> None:
    """The whole training run, on rank 0."""
    from megappo.data.prompts import PromptStream
    from megappo.observe.progress import Progress
    from megappo.observe.rollouts import write_rollouts
    from megappo.observe.summary import summary_lines
    from megappo.observe.trackers import open_trackers
    from megappo.rewards.load import load_reward
    from megappo.trainer.export import check_start, export_published
    from megappo.trainer.ppo import PPO, timed
    from megappo.trainer.rollout import to_rows

    assert engine is not None
    config, steps = plan.config, plan.config.trainer.steps
    tokenizer, rows, evaluation = _data(config)
    prompts = PromptStream(rows, config.run.seed, config.data.shuffle)
    ppo = PPO(config, workers, engine, publisher, tokenizer, prompts, load_reward(config.reward.function))
    ppo.publish(version=0)
    check_start(publisher, config)

    def validate(step: int) -> float:
        assert evaluation is not None
        found = evaluation.run(engine, step)
        write_rollouts(run_dir / "validation", step, to_rows(found.samples, found.scores))
        return found.accuracy

    before = after = validate(step=0) if evaluation else None
    rewards = []
    trackers = open_trackers(run_dir, config.run.trackers)
    try:
        with Progress(steps) as progress:
            for step in range(1, steps + 1):
                metrics = ppo.step(step)
                if evaluation and (step == steps or _every(step, config.trainer.validate_every)):
                    with timed(metrics, "validate"):
                        after = metrics["validation/accuracy"] = validate(step)
                if _every(step, config.trainer.save_every):
                    with timed(metrics, "save"):
                        export_published(run_dir / "checkpoints" / f"step_{step:06d}" / "actor", publisher, config)
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
    plan: Plan, run_dir: Path, workers: LocalWorkerGroup, engine: RolloutEngine | None, publisher: WeightPublisher
) -> None:
    """The whole warm start, on rank 0. Without an engine nothing is evaluated."""
    from megappo.trainer.sft import warm_start

    tokenizer, rows, evaluation = _data(plan.config)
    warm_start(plan.config, workers, engine, publisher, tokenizer, rows, evaluation if engine else None)


def _data(config: Config) -> tuple[Tokenizer, list[PromptRow], Evaluation | None]:
    """Tokenizer, training rows, and the evaluation where there are validation rows."""
    from megappo.data.prompts import load_prompts
    from megappo.data.tokenizer import load_tokenizer
    from megappo.rewards.load import load_reward
    from megappo.trainer.evaluate import Evaluation

    tokenizer, seed, longest = load_tokenizer(str(config.model.tokenizer)), config.run.seed, config.rollout.max_prompt_tokens
    rows = load_prompts(config.data.train, config.data, tokenizer, longest, seed)
    if config.data.validation is None:
        return tokenizer, rows, None
    held_out = load_prompts(config.data.validation, config.data, tokenizer, longest, seed + 1)
    held_out = held_out[: config.trainer.max_validation_rows]
    return tokenizer, rows, Evaluation(config, held_out, tokenizer, load_reward(config.reward.function))


def _every(step: int, period: int) -> bool:
    return period > 0 and step % period == 0
