"""The supervised warm start: next-token loss on the answers of data.train, stopped at a wanted accuracy."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megappo.config.schema import Config
from megappo.controller.worker import WorkerGroup
from megappo.data.prompts import PromptRow
from megappo.data.stream import PromptStream
from megappo.data.tokenizer import Tokenizer
from megappo.errors import UserError
from megappo.observe.progress import Progress
from megappo.pp_weights.hf_writer import write_hf_folder
from megappo.rollout.engine import RolloutEngine
from megappo.trainer.batch import pad_batch
from megappo.trainer.evaluate import Evaluation
from megappo.trainer.workers import WeightPublisher


def warm_start(
    config: Config,
    workers: WorkerGroup,
    engine: RolloutEngine | None,
    publisher: WeightPublisher,
    tokenizer: Tokenizer,
    rows: Sequence[PromptRow],
    evaluation: Evaluation | None,
) -> None:
    """Train for sft.steps, or until sft.stop_at_accuracy is reached, and write sft.output.

    With sft.max_accuracy the last state below it is written, so that something is left to learn."""
    sft = config.sft
    prompts = PromptStream(rows, config.run.seed, config.data.shuffle, config.data.weights)
    kept: dict[str, Tensor] | None = None
    with Progress(sft.steps) as progress:
        for step in range(1, sft.steps + 1):
            batch = _answers(prompts.next_batch(sft.batch_size), tokenizer, config)
            metrics = workers.call("actor", "supervised_update", batch, step=step)[1]
            if engine is None or evaluation is None or sft.evaluate_every == 0 or step % sft.evaluate_every:
                continue
            tensors = _publish(workers, publisher, step)
            assert publisher.buffer is not None
            engine.update_weights(publisher.buffer, verify=True)
            accuracy = evaluation.run(engine, step, greedy_only=True).accuracy
            progress.update(step, {"loss": metrics["loss"], "accuracy": accuracy})
            too_good = sft.max_accuracy is not None and accuracy >= sft.max_accuracy
            if not too_good:
                kept = {name: tensor.clone() for name, tensor in tensors.items()}
            if too_good or (sft.stop_at_accuracy is not None and accuracy >= sft.stop_at_accuracy):
                break
        else:
            kept = None if sft.max_accuracy is None else kept
    final = kept or _publish(workers, publisher, sft.steps + 1)
    dtypes = {name: tensor.dtype for name, tensor in final.items()}
    write_hf_folder(sft.output, final.items(), dtypes, config_from=config.model.path)


def _publish(workers: WorkerGroup, publisher: WeightPublisher, version: int) -> dict[str, Tensor]:
    workers.call("weights", "publish", version=version, verify=True)
    assert publisher.buffer is not None, "rank 0 receives the weights"
    return publisher.buffer.views()


def _answers(rows: Sequence[PromptRow], tokenizer: Tokenizer, config: Config) -> dict[str, Tensor]:
    """Padded batch of prompts and answers, each ended by the end-of-sequence token."""
    responses = []
    for row in rows:
        if row.answer is None:
            raise UserError(f"{row.source}:{row.position} has no {config.data.answer_key!r}; the warm start needs answers")
        responses.append([*tokenizer.encode(row.answer), tokenizer.eos_ids[0]])
    return pad_batch([row.prompt_ids for row in rows], responses, tokenizer.pad_id)
