"""What does rank 0 do for the length of a run? `drive_ppo` and `drive_sft`: the loop, its validations, saves and files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megappo.checkpoint.format import saved_step
from megappo.config.check import Plan
from megappo.config.schema import Config
from megappo.controller.worker import WorkerGroup
from megappo.data.load import Data
from megappo.data.stream import PromptStream
from megappo.observe.progress import Progress
from megappo.observe.rollouts import write_rollouts
from megappo.observe.summary import summary_lines
from megappo.observe.timing import timed
from megappo.observe.trackers import open_trackers
from megappo.rewards.score import Scorer
from megappo.rollout.engine import RolloutEngine
from megappo.trainer.evaluate import Evaluation
from megappo.trainer.passes import Passes
from megappo.trainer.ppo import PPO
from megappo.trainer.roles import WeightPublisher
from megappo.trainer.rollout import to_rows
from megappo.trainer.sampling import Sampler
from megappo.trainer.sft import warm_start
from megappo.trainer.start_check import StartCheck


@dataclass(frozen=True)
class Driver:
    """What rank 0 has in hand once the models are built. engine and scorer: None where nothing is generated."""

    plan: Plan
    run_dir: Path
    data: Data
    workers: WorkerGroup
    publisher: WeightPublisher
    engine: RolloutEngine | None
    scorer: Scorer | None

    @property
    def config(self) -> Config:
        return self.plan.config

    def evaluation(self) -> Evaluation | None:
        """The evaluation, where there is something to evaluate with and on."""
        if self.data.validation is None or self.scorer is None:
            return None
        return Evaluation(self.config, self.data.validation, self.data.tokenizer, self.scorer)


def drive_ppo(driver: Driver) -> None:
    """The whole training run."""
    config, run_dir, workers, data = driver.config, driver.run_dir, driver.workers, driver.data
    engine, scorer, publisher, steps = driver.engine, driver.scorer, driver.publisher, config.trainer.steps
    assert engine is not None and scorer is not None
    evaluation = driver.evaluation()
    prompts = PromptStream(data.train, config.run.seed, config.data.shuffle, config.data.weights)
    # Before anything is generated, in every life of a run. A checkpoint's weights keep the version that they were saved with.
    first_version = saved_step(config.model.path)
    sampler = Sampler(config, engine, data.tokenizer, prompts, scorer)
    ppo = PPO(driver.plan, workers, engine, sampler, first_version)
    publisher.receivers = [engine, StartCheck(publisher.manager.plan, config.model.path)]
    ppo.publish(first_version)
    publisher.receivers = [engine]
    ppo.offload()

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
                assert ppo.sampled is not None
                write_rollouts(run_dir / "rollouts", step, to_rows(ppo.sampled.samples, ppo.sampled.scores, ppo.sampled.learnt))
                trackers.log(step, metrics)
                progress.update(step, metrics)
                rewards.append(metrics["reward/mean"])
    finally:
        trackers.close()
    workers.call("weights", "export", folder=str(run_dir / "final"), config_from=config.model.path)
    for line in summary_lines(rewards, before, after):
        print(line, flush=True)  # noqa: T201 - the result of the command, for scripts


def drive_sft(driver: Driver) -> None:
    """The whole warm start. Without an engine nothing is evaluated."""
    data = driver.data
    if driver.engine is not None:
        driver.publisher.receivers = [driver.engine]
    warm_start(
        driver.config,
        driver.workers,
        Passes(driver.plan, driver.workers),
        driver.engine,
        data.tokenizer,
        data.train,
        driver.evaluation(),
    )


def _every(step: int, period: int) -> bool:
    return period > 0 and step % period == 0
