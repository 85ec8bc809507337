"""Small model folders and batches for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megappo.config.schema_models import OptimizerConfig

# What each family adds to the common sizes. Rotary positions are stretched within the length of the tests' sequences.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3_biases": (
        "Llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "attention_bias": ("Llama", {"attention_bias": True}),
    "linear_mlp_bias": (
        "Llama",
        {"mlp_bias": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": 6}),
    "qwen2": ("Qwen2", {"hidden_size": 128}),  # vLLM takes its head_dim for hidden size over heads
    "qwen3": ("Qwen3", {"hidden_size": 96}),  # 4 heads of 32 are more than the hidden size
}


def make_model_folder(
    folder: Path, family: str = "llama", *, tied: bool = False, layers: int = 4, seed: int = 7, head: str = "lm", **config: Any
) -> Path:
    """Write a random model of a family (a key of FAMILIES) as a Hugging Face folder; weights are large enough that every part
    matters, biases and norms included."""
    import transformers

    torch.manual_seed(seed)
    name, own = FAMILIES[family]
    sizes: dict[str, Any] = {
        "vocab_size": 61,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if head == "value":
        sizes["num_labels"] = 1
    kind = "ForCausalLM" if head == "lm" else "ForSequenceClassification"
    model = getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**(sizes | own | config)))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            scale = 0.3 if parameter.dim() == 1 else 0.15
            parameter.copy_(torch.randn_like(parameter) * scale + (1.0 if "norm" in parameter_name else 0.0))
    model.save_pretrained(folder)
    return folder


def make_llama_folder(folder: Path, *, tied: bool, layers: int = 4, seed: int = 7, vocab_size: int = 61) -> Path:
    return make_model_folder(folder, "llama", tied=tied, layers=layers, seed=seed, vocab_size=vocab_size)


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


def transformers_log_probs(
    folder: Path, batch: dict[str, Tensor], temperature: float = 1.0, model: Any = None
) -> tuple[Tensor, Tensor]:
    """The independent answer: each sample alone through transformers (`model`, or that of the folder), float32. log_probs and
    entropy (b, r)."""
    from transformers import AutoModelForCausalLM

    model = model or AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
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


# No clipping; eps above the rounding error of a gradient, which Adam's first step would turn into whole learning rates.
# The decay is so large that a bias or norm that were decayed, too, would show.
PLAIN_ADAM = OptimizerConfig(lr=1e-3, decay_steps=1, betas=(0.9, 0.95), clip_grad=0.0, eps=1e-7, weight_decay=20.0)


def transformers_update(
    folder: Path, batch: dict[str, Tensor], optimizer: OptimizerConfig, *, entropy_coef: float = 0.0, clip_range: float = 0.2
) -> tuple[Any, float]:
    """The independent answer to one PPO update: plain autograd and AdamW, vectors not decayed, each sample alone.
    (updated model, gradient norm)."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = batch["response_mask"].sum()
    for i in range(len(batch["input_ids"])):
        ids = batch["input_ids"][i][batch["attention_mask"][i]]
        count = int(batch["response_mask"][i].sum())
        log_p = model(ids[None]).logits[0, -count - 1 : -1].log_softmax(-1)
        log_probs, entropy = log_p.gather(1, ids[-count:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
        ratio = (log_probs - batch["old_log_probs"][i, :count]).exp()
        advantages = batch["advantages"][i, :count]
        clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
        loss = -torch.minimum(ratio * advantages, clipped * advantages) - entropy_coef * entropy
        (loss.sum() / total).backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm().item()
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": optimizer.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps).step()
    return model, norm


@torch.no_grad()
def transformers_values(folder: Path, batch: dict[str, Tensor]) -> Tensor:
    """Scores (b, r) of a `...ForSequenceClassification` model in front of each response token, each sample alone."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    values = torch.zeros(batch["response_mask"].shape)
    for i in range(len(values)):
        ids = batch["input_ids"][i][batch["attention_mask"][i]]
        count = int(batch["response_mask"][i].sum())
        hidden = model.model(ids[None]).last_hidden_state
        values[i, :count] = model.score(hidden)[0, -count - 1 : -1, 0]
    return values
