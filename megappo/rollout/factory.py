"""Which engine does the config ask for? `make_engine`; imports neither vllm nor torch before the engine is made."""

from __future__ import annotations

from pathlib import Path

from megappo.config.schema import Config
from megappo.models.shape import hf_files
from megappo.rollout.engine import RolloutEngine
from megappo.rollout.request import EngineLimits, read_limits


def engine_limits(config: Config, model_path: str | Path) -> EngineLimits:
    """What that engine takes at most."""
    return read_limits(hf_files(model_path), config.rollout.max_prompt_tokens + config.rollout.max_new_tokens)


def engine_devices(rank: int, local_rank: int, training_ranks: int, tp: int) -> tuple[int, ...]:
    """The GPUs of a rank's engine, as this host counts them. A rank that trains shares its own and the next ones with its engine;
    those of ranks that only generate come after the GPUs of this host's training ranks, `tp` for each."""
    if rank < training_ranks:
        return tuple(range(local_rank, local_rank + tp))
    training_here = max(0, training_ranks - (rank - local_rank))
    first = training_here + (local_rank - training_here) * tp
    return tuple(range(first, first + tp))


def make_engine(
    config: Config,
    model_path: str | Path,
    *,
    log_path: str | Path,
    device: str = "cpu",
    devices: tuple[int, ...] | None = None,
    start_timeout_s: float = 600.0,
) -> RolloutEngine:
    """The engine of `config.rollout` for the model in `model_path`, a Hugging Face folder or checkpoint; its weights come later.

    log_path: file for what an engine process prints. devices: which of the GPUs that this process sees are vLLM's; None: all."""
    rollout, files = config.rollout, hf_files(model_path)
    dtype = rollout.dtype or config.model.dtype
    max_model_len = rollout.max_prompt_tokens + rollout.max_new_tokens
    if rollout.engine == "hf":
        from megappo.rollout.hf_engine import HfEngine

        return HfEngine(files, max_model_len=max_model_len, dtype=dtype, max_num_seqs=rollout.max_num_seqs, device=device)
    from megappo.rollout.vllm_engine import VllmEngine

    return VllmEngine(
        files,
        log_path=log_path,
        max_model_len=max_model_len,
        dtype=dtype,
        tp=rollout.tp,
        max_num_seqs=rollout.max_num_seqs,
        kv_cache_bytes=rollout.kv_cache_bytes,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        threads=rollout.threads,
        device=device,
        devices=devices,
        zero_copy=config.pp_weights.zero_copy,
        start_timeout_s=start_timeout_s,
    )
