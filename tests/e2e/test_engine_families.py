"""Does vLLM load what is published for each family, whole and in shards, and sample what transformers would?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.buckets import worker_shard
from tests.e2e.test_engine_vllm import GREEDY, SAMPLED, Trainer, build, random_prompts
from tests.models import make_model_folder

pytestmark = [pytest.mark.vllm]

LONG_QWEN2 = pytest.param("qwen2", 1, marks=pytest.mark.long)
LONG_QWEN3 = pytest.param("qwen3", 2, marks=pytest.mark.long)
PROMPTS = random_prompts([40, 17, 3, 1])


@pytest.mark.parametrize("family, tp", [("llama3_biases", 2), ("mistral", 1), LONG_QWEN2, LONG_QWEN3])
def test_vllm_answers_as_transformers_does(tmp_path: Path, family: str, tp: int) -> None:
    """With two workers the second version comes in shards: llama3_biases has all biases, qwen3 norms of
    queries and keys."""
    folder = make_model_folder(tmp_path / "model", family, tied=family in ("llama3_biases", "qwen2"))
    engine = build("vllm-tp2" if tp == 2 else "vllm", folder, tmp_path)
    try:
        trainer = Trainer(folder)
        for version in (1, 2):  # the second version must replace all of the first
            if version == 2 and tp == 2:
                trainer.send(engine, shards=[worker_shard(trainer.tensors, worker, tp) for worker in range(tp)])
            else:
                trainer.publish(engine)
            trainer.check_greedy(PROMPTS, engine.generate(PROMPTS, GREEDY, seeds=[1, 2, 3, 4]))
            trainer.check_log_probs(PROMPTS, engine.generate(PROMPTS, SAMPLED, seeds=[1, 2, 3, 4]), SAMPLED.temperature)
            trainer.change_weights(seed=11)
    finally:
        engine.close()
