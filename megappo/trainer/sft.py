"""The supervised warm start: next-token loss on the answers of data.train, stopped at a wanted accuracy."""

from __future__ import annotations

from collections.abc import Sequence

from megappo.config.schema import Config
from megappo.controller.worker import WorkerGroup
from megappo.data.prompts import PromptRow
from megappo.data.proto import DataProto
from megappo.data.stream import PromptStream
from megappo.data.tokenizer import Tokenizer
from megappo.errors import RunFailed, UserError
from megappo.observe.progress import Progress
from megappo.rollout.engine import RolloutEngine
from megappo.trainer.batch import pad_batch
from megappo.trainer.evaluate import Evaluation
from megappo.trainer.passes import Passes


def warm_start(
    config: Config,
    workers: WorkerGroup,
    passes: Passes,
    engine: RolloutEngine | None,
    tokenizer: Tokenizer,
    rows: Sequence[PromptRow],
    evaluation: Evaluation | None,
) -> None:
    """Train for sft.steps, or until sft.stop_at_accuracy is reached, and write sft.output.

    With sft.max_accuracy the last state below it is written, so that something is left to learn."""
    sft = config.sft
    prompts = PromptStream(rows, config.run.seed, config.data.shuffle, config.data.weights)
    is_written = False
    with Progress(sft.steps) as progress:
        for step in range(1, sft.steps + 1):
            batch = _answers(prompts.next_batch(sft.batch_size), tokenizer, config)
            metrics, reason = passes.update("actor", batch, (), step=step, method="supervised_update")
            if reason is not None:
                raise RunFailed(
                    f"step {step} of the warm start was skipped: {reason}; lower actor.optimizer.lr, or look at the data"
                )
            if engine is None or evaluation is None or sft.evaluate_every == 0 or step % sft.evaluate_every:
                continue
            workers.call("weights", "publish", version=step, verify=True)
            accuracy = evaluation.run(engine, step, greedy_only=True).accuracy
            progress.update(step, {"loss": metrics["loss"], "accuracy": accuracy})
            too_good = sft.max_accuracy is not None and accuracy >= sft.max_accuracy
            if sft.max_accuracy is not None and not too_good:
                _write(workers, config)
                is_written = True
            if too_good or (sft.stop_at_accuracy is not None and accuracy >= sft.stop_at_accuracy):
                break
    if not is_written:
        _write(workers, config)


def _write(workers: WorkerGroup, config: Config) -> None:
    workers.call("weights", "export", folder=config.sft.output, config_from=config.model.path)


def _answers(rows: Sequence[PromptRow], tokenizer: Tokenizer, config: Config) -> DataProto:
    """Padded batch of prompts and answers, each ended by the end-of-sequence token."""
    responses = []
    for row in rows:
        if row.answer is None:
            raise UserError(f"{row.source}:{row.position} has no {config.data.answer_key!r}; the warm start needs answers")
        responses.append([*tokenizer.encode(row.answer), tokenizer.eos_ids[0]])
    return pad_batch([row.prompt_ids for row in rows], responses, tokenizer.pad_id)
