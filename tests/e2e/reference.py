"""What would transformers have said? The independent answer to what a run wrote about its samples."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.checkpoint.convert import export_model
from megappo.models.shape import checkpoint_folder


def load(path: Path) -> Any:
    """transformers' model of a Hugging Face folder, or of what a checkpoint is exported to."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as temporary:
        folder = path
        if checkpoint_folder(path) is not None:
            folder = Path(temporary) / "exported"
            export_model(str(path), str(folder), [])
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)


def check_greedy(folder: Path, rows: list[dict[str, Any]], max_new_tokens: int, eos: int) -> None:
    """Each row's response is the greedy one to its prompt, token for token."""
    model = load(folder)
    for row in rows:
        ids = list(row["prompt_ids"])
        found: list[int] = []
        while len(found) < max_new_tokens and found[-1:] != [eos]:
            found.append(int(model(torch.tensor([ids + found])).logits[0, -1].argmax()))
        assert row["response_ids"] == found


def check_log_probs(folder: Path, rows: list[dict[str, Any]], temperature: float) -> None:
    """Each row's log-probs are those of its response over the whole vocabulary, at the temperature."""
    model = load(folder)
    for row in rows:
        prompt, response = row["prompt_ids"], row["response_ids"]
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        assert row["logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)
