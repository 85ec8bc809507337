"""Which engine does the config ask for? `make_engine`; imports neither vllm nor torch before the engine is made."""

from __future__ import annotations

from pathlib import Path

from megappo.config.schema import Config
from megappo.models.shape import hf_files
from megappo.rollout.engine import RolloutEngine


def make_engine(
    config: Config, model_path: str | Path, *, log_path: str | Path, device: str = "cpu", start_timeout_s: float = 600.0
) -> RolloutEngine:
    """The engine of `config.rollout` for the model in `model_path`, a Hugging Face folder or checkpoint; its weights come later.

    log_path: file for what an engine process prints."""
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
        threads=rollout.threads,
        device=device,
        start_timeout_s=start_timeout_s,
    )
