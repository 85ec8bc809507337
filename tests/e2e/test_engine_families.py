"""Does vLLM load what is published for each family, and sample what transformers would?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_engine_vllm import GREEDY, SAMPLED, Trainer, build, random_prompts
from tests.models import make_model_folder

pytestmark = [pytest.mark.vllm]

PROMPTS = random_prompts([40, 17, 3, 1])


@pytest.mark.parametrize("family", ["llama3", "mistral", "qwen2", "qwen3"])
def test_vllm_answers_as_transformers_does(tmp_path: Path, family: str) -> None:
    folder = make_model_folder(tmp_path / "model", family, tied=family == "qwen2")
    engine = build("vllm", folder, tmp_path)
    try:
        trainer = Trainer(folder)
        for _ in range(2):  # the second version must replace all of the first
            trainer.publish(engine)
            trainer.check_greedy(PROMPTS, engine.generate(PROMPTS, GREEDY, seeds=[1, 2, 3, 4]))
            trainer.check_log_probs(PROMPTS, engine.generate(PROMPTS, SAMPLED, seeds=[1, 2, 3, 4]), SAMPLED.temperature)
            trainer.change_weights(seed=11)
    finally:
        engine.close()
