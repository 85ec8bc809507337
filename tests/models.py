"""Small model folders and batches for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def make_llama_folder(folder: Path, *, tied: bool, layers: int = 4, seed: int = 7, vocab_size: int = 61) -> Path:
    """Write a random Llama as a Hugging Face folder; weights are large enough that every part matters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        rope_theta=5000.0,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if parameter.dim() == 1 else 0.15
            parameter.copy_(torch.randn_like(parameter) * scale + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)
    return folder


def make_batch(
    prompt_lengths: list[int], response_lengths: list[int], *, vocab_size: int = 61, seed: int = 3
) -> dict[str, Tensor]:
    """A padded batch: prompts left-padded, responses right-padded."""
    generator = torch.Generator().manual_seed(seed)
    p, r, b = max(prompt_lengths), max(response_lengths), len(prompt_lengths)
    input_ids = torch.zeros(b, p + r, dtype=torch.long)
    attention_mask = torch.zeros(b, p + r, dtype=torch.bool)
    response_mask = torch.zeros(b, r, dtype=torch.bool)
    for i, (prompt, response) in enumerate(zip(prompt_lengths, response_lengths, strict=True)):
        input_ids[i, p - prompt : p + response] = torch.randint(3, vocab_size, (prompt + response,), generator=generator)
        attention_mask[i, p - prompt : p + response] = True
        response_mask[i, :response] = True
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "response_mask": response_mask,
        "old_log_probs": -torch.rand(b, r, generator=generator),
        "advantages": torch.randn(b, r, generator=generator),
        "values": torch.randn(b, r, generator=generator),
        "returns": torch.randn(b, r, generator=generator),
    }


def transformers_log_probs(folder: Path, batch: dict[str, Tensor], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The independent answer: each sample alone through transformers, float32. log_probs and entropy (b, r)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    shape = batch["response_mask"].shape
    log_probs, entropy = torch.zeros(shape), torch.zeros(shape)
    for i in range(shape[0]):
        ids = batch["input_ids"][i][batch["attention_mask"][i]]
        count = int(batch["response_mask"][i].sum())
        with torch.no_grad():
            logits = model(ids[None]).logits[0, -count - 1 : -1] / temperature
        log_p = logits.log_softmax(-1)
        log_probs[i, :count] = log_p.gather(1, ids[-count:, None]).squeeze(1)
        entropy[i, :count] = -(log_p.exp() * log_p).sum(-1)
    return log_probs, entropy
