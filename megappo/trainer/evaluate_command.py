"""How does `megappo eval` run? One process and one engine: weights from the folder or checkpoint, no Megatron, no ranks."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch

from megappo.checkpoint.source import hf_tensors
from megappo.config.check import Plan
from megappo.data.load import load_validation
from megappo.data.tokenizer import load_tokenizer
from megappo.observe.metrics import as_json_number
from megappo.observe.rollouts import write_rows
from megappo.parallel_state.device import device
from megappo.pp_weights.assemble import deliver
from megappo.pp_weights.buffer import WeightBuffer
from megappo.pp_weights.manifest import TensorMeta, build_manifest
from megappo.pp_weights.mapping import expected_hf_tensors
from megappo.pp_weights.plan import model_order
from megappo.pp_weights.verify import checksums
from megappo.rewards.score import Scorer
from megappo.rollout.factory import make_engine
from megappo.trainer.evaluate import Evaluated, Evaluation
from megappo.trainer.run_folder import open_run_folder

log = logging.getLogger("megappo")


def evaluate(plan: Plan) -> int:
    """Evaluate model.path on data.validation. Prints the results and writes them to the folder `{run.name}_eval`: every response
    in responses.jsonl, the figures in results.json. Returns the exit code; raises UserError or RunFailed with the first cause."""
    config = plan.config
    torch.set_num_threads(config.run.threads_per_rank)
    tokenizer = load_tokenizer(str(config.model.tokenizer))
    rows = load_validation(config, tokenizer)
    folder = open_run_folder(Path(config.run.dir) / f"{config.run.name}_eval", config)
    engine = make_engine(config, config.model.path, log_path=folder / "logs" / "engine.log", device=device().type)
    try:
        with Scorer(config.reward, folder / "logs" / "reward.log") as scorer:
            buffer = _weights(plan)
            deliver(engine, buffer, verify=True)
            buffer.close()
            sampled = f" and {config.eval.samples} sampled" if config.eval.samples else ""
            log.info("%s: a greedy%s responses to each of %d prompts", config.model.path, sampled, len(rows))
            found = Evaluation(config, rows, tokenizer, scorer).run(engine, step=0)
    finally:
        engine.close()
    write_rows(folder / "responses.jsonl", found.rows())
    (folder / "results.json").write_text(json.dumps(results(found), indent=2) + "\n", encoding="utf-8")
    for line in result_lines(found):
        print(line)  # noqa: T201 - the result of the command, for scripts
    print(f"responses: {folder / 'responses.jsonl'}", flush=True)  # noqa: T201
    return 0


def results(found: Evaluated) -> dict[str, object]:
    """The figures, for scripts."""
    numbers: dict[str, object] = {
        "rows": len(found.greedy.samples),
        "skipped": found.num_skipped,
        "greedy_accuracy": as_json_number(found.accuracy),
    }
    if found.sampled and found.avg_at_k is not None:
        numbers |= {
            "samples": found.sampled.per_row,
            "avg_at_k": as_json_number(found.avg_at_k),
            "pass_at_k": {str(k): as_json_number(value) for k, value in found.pass_at.items()},
        }
    return numbers


def result_lines(found: Evaluated) -> list[str]:
    """The figures, for people: `greedy accuracy: 0.42`, `avg@4: 0.38`, `pass@1: 0.38`, ..."""
    lines = [f"rows: {len(found.greedy.samples)}", f"greedy accuracy: {found.accuracy:.4f}"]
    if found.sampled:
        lines.append(f"avg@{found.sampled.per_row}: {found.avg_at_k:.4f}")
        lines += [f"pass@{k}: {value:.4f}" for k, value in found.pass_at.items()]
    if found.num_skipped:
        lines.append(f"skipped responses: {found.num_skipped}")
    return lines


def _weights(plan: Plan) -> WeightBuffer:
    """The model's tensors in one buffer, checksummed, as version 0."""
    dtype = getattr(torch, plan.config.rollout.dtype or plan.config.model.dtype)
    sizes = expected_hf_tensors(plan.shapes["actor"])
    meta = {name: TensorMeta(size, dtype) for name, size in sizes.items()}
    buffer = WeightBuffer.create(build_manifest(meta, order=model_order(plan.shapes["actor"])))
    views = buffer.views()
    for name, tensor in hf_tensors(plan.config.model.path):
        views[name].copy_(tensor)
    buffer.manifest = buffer.manifest.stamped(0, checksums(views))
    return buffer
