"""Which key did the user mean? The nearest key of the schema: by its last word, then by its place. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher, get_close_matches

# Words for the same thing in other trainers, and what it is called here.
_SYNONYMS = {
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "ppo_epochs": "epochs",
    "num_train_epochs": "epochs",
    "max_steps": "steps",
    "total_steps": "steps",
    "num_steps": "steps",
    "cliprange": "clip_range",
    "clip_ratio": "clip_range",
    "cliprange_value": "value_clip_range",
    "lam": "gae_lambda",
    "lambda": "gae_lambda",
    "tensor_parallel_size": "tp",
    "tensor_model_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "vpp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "data_parallel_size": "dp",
    "ppo_mini_batch_size": "mini_batch_size",
    "ppo_micro_batch_size_per_gpu": "micro_batch_size",
    "ppo_max_token_len_per_gpu": "micro_batch_tokens",
    "train_batch_size": "batch_size",
    "rollout_batch_size": "batch_size",
    "max_tokens": "max_new_tokens",
    "max_response_length": "max_new_tokens",
    "max_prompt_length": "max_prompt_tokens",
    "num_samples": "n",
    "max_grad_norm": "clip_grad",
    "grad_clip": "clip_grad",
    "entropy_coeff": "entropy_coef",
    "init_kl_coef": "kl_coef",
    "kl_loss_type": "kl_loss",
    "adv_estimator": "advantages",
    "advantage_estimator": "advantages",
    "norm_adv_by_std_in_grpo": "normalize_by_std",
    "loss_agg_mode": "loss_aggregation",
    "clip_ratio_low": "clip_range",
    "clip_ratio_high": "clip_range_high",
    "clip_ratio_c": "dual_clip",
    "eps_clip": "clip_range",
    "eps_clip_high": "clip_range_high",
    "tis_imp_ratio_cap": "cap",
    "critic_warmup": "warmup_steps",
    "n_samples_per_prompt": "n",
    "log_prob_max_token_len_per_gpu": "score_micro_batch_tokens",
    "num_warmup_steps": "warmup_steps",
    "lr_warmup_steps": "warmup_steps",
    "train_files": "train",
    "val_files": "validation",
    "test_freq": "validate_every",
    "save_freq": "save_every",
    "save_steps": "save_every",
    "experiment_name": "name",
    "output_dir": "dir",
}


def nearest_key(unknown: str, known: Sequence[str]) -> str | None:
    """The key among `known` (dotted) that `unknown` (dotted) most likely stands for; None where nothing is near.

    The last word decides first, so that a right word at a wrong level finds its place; the words before it break ties.
    """
    *parents, leaf = unknown.replace("-", "_").lower().split(".")
    by_leaf: dict[str, list[str]] = {}
    for key in known:
        by_leaf.setdefault(key.rpartition(".")[2], []).append(key)
    for word in get_close_matches(leaf, [*by_leaf, *_SYNONYMS], n=8, cutoff=0.6):
        candidates = by_leaf.get(word) or by_leaf.get(_SYNONYMS.get(word, ""))
        if candidates:
            return max(candidates, key=lambda key: _likeness(".".join(parents), key.rpartition(".")[0]))
    return None


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
