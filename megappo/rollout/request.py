"""Can the engine serve this? Checks of a model folder and of a generate call, the same for every engine. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megappo.errors import UserError
from megappo.models.quantised import quantisation
from megappo.models.shape import read_hf_config
from megappo.rollout.engine import SamplingParams

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0  # vLLM raises smaller ones silently and refuses larger ones


@dataclass(frozen=True)
class EngineLimits:
    """max_model_len: prompt and response together, in tokens."""

    max_model_len: int
    vocab_size: int


def read_limits(model_path: str | Path, max_model_len: int) -> EngineLimits:
    """Limits of an engine for this folder. Raises UserError for quantised models and for lengths past the model's positions."""
    config = read_hf_config(model_path)
    if quantised := quantisation(model_path):
        raise UserError(
            f"{model_path} is quantised ({quantised}), but weights are published unquantised; give an unquantised folder"
        )
    positions = config.get("max_position_embeddings")
    if positions is not None and max_model_len > positions:
        raise UserError(
            f"rollout.max_prompt_tokens + rollout.max_new_tokens = {max_model_len} is more than the {positions} positions of "
            f"{model_path}; make one of them smaller"
        )
    return EngineLimits(max_model_len, int(config["vocab_size"]))


def check_request(limits: EngineLimits, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]) -> None:
    """Raise UserError, naming the first fault, where the engine would refuse the call or quietly do something else."""
    if len(prompts) != len(seeds):
        raise UserError(f"{len(prompts)} prompts but {len(seeds)} seeds; give one seed a prompt")
    check_sampling(sampling)
    longest = limits.max_model_len - sampling.max_new_tokens
    for index, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= longest:
            raise UserError(
                f"prompt {index} has {len(prompt)} tokens; with {sampling.max_new_tokens} new tokens the engine takes 1 to "
                f"{longest}: raise rollout.max_prompt_tokens or drop the row"
            )
        if min(prompt) < 0 or max(prompt) >= limits.vocab_size:
            raise UserError(
                f"prompt {index} holds a token id outside 0..{limits.vocab_size - 1} ({min(prompt)} to {max(prompt)}); "
                "the tokenizer is not the model's"
            )
    for index, seed in enumerate(seeds):
        if not 0 <= seed < 1 << 63:
            raise UserError(f"seed {seed} of prompt {index} is not in 0..2**63-1; use rollout.engine.request_seed")


def check_sampling(sampling: SamplingParams) -> None:
    if sampling.max_new_tokens < 1:
        raise UserError(f"rollout.max_new_tokens={sampling.max_new_tokens} must be at least 1")
    if sampling.temperature != 0 and not MIN_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE:
        raise UserError(
            f"rollout.temperature={sampling.temperature} must be 0 (greedy) or in {MIN_TEMPERATURE}..{MAX_TEMPERATURE}"
        )
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"rollout.top_p={sampling.top_p} must be above 0 and at most 1; 1 is off")
    if sampling.top_k < 1 and sampling.top_k not in (-1, 0):
        raise UserError(f"rollout.top_k={sampling.top_k} must be at least 1, or -1 for off")
