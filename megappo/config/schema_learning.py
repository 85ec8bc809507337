"""What can be learnt from, and how? The sections `data`, `reward` and `algorithm`. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class DataConfig:
    """Prompts."""

    train: str | tuple[str, ...] = "???"
    """Training prompts: one source or a list of them. A source is a `.jsonl` or `.parquet` file, a folder of `.parquet` files, a
    folder written by `Dataset.save_to_disk`, or `reasoning_gym:TASK` (needs the extra `tasks`). See docs/data.md."""
    validation: str | tuple[str, ...] | None = None
    """Validation prompts, with answers: one source or a list of them."""
    weights: tuple[float, ...] | None = None
    """Share of the prompts that each source of `train` contributes, in any unit, e.g. [3, 1]; default: the sources are
    concatenated, and each row comes once an epoch."""
    prompt_key: str = "prompt"
    """Key of the prompt: a string, or a list of chat messages."""
    answer_key: str = "answer"
    """Key of the answer that reward functions get."""
    id_key: str = "id"
    """Key of a row's own id, which rollout files show; a row without one is called `source:position`."""
    overlong: Literal["fail", "drop", "truncate_left", "truncate_right"] = "fail"
    """A prompt of more than rollout.max_prompt_tokens tokens, chat template and BOS included: `fail` refuses it, `drop` leaves it
    out, `truncate_left` keeps BOS and the last tokens, `truncate_right` the first ones. What was dropped or cut is counted."""
    chat_template: bool = False
    """Render prompts through the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message in front of each prompt; with chat_template only."""
    shuffle: bool = True
    """Shuffle the training prompts anew in each epoch, seeded."""
    task_size: int = 1000
    """Number of rows drawn from a generated task (`reasoning_gym:...`)."""
    task_options: dict[str, Any] = field(default_factory=dict)
    """Options of a generated task, e.g. {min_digits: 2}."""


@dataclass(frozen=True)
class RewardPart:
    """One of several rewards that are added up."""

    function: str = "???"
    """Name of a built-in reward, or `path/to/file.py:function`."""
    weight: float = 1.0
    """What the part is multiplied by; with 0 it is only measured."""
    name: str | None = None
    """Its name in metrics and rollouts; default: the function's, without the file."""


@dataclass(frozen=True)
class RewardConfig:
    """The score of a response. docs/rewards.md shows how to choose, write and combine rewards."""

    function: str = "exact_match"
    """Name of a built-in reward (`exact_match`, `last_number`, `math`, `reasoning_gym`), or `path/to/file.py:function`."""
    parts: tuple[RewardPart, ...] = ()
    """Several rewards in place of `function`: the score is the sum of weight x part, and each part is a metric of its own."""
    scale: float = 1.0
    """What scores are multiplied by before they are learnt from. Metrics and rollouts show them unscaled."""
    divide_by_std: bool = False
    """Divide them by the standard deviation of all scores of the run so far."""
    clip: float | None = None
    """Clip them to +-this, last of all; default: no clip."""
    overlong_buffer: int = 0
    """Tokens before rollout.max_new_tokens in which a response loses score the more the longer it is, up to
    `overlong_penalty` (DAPO's soft punishment); 0: off."""
    overlong_penalty: float = 1.0
    """What a response of full length loses, before scaling; with `overlong_buffer`."""
    on_error: Literal["fail", "skip_sample", "score"] = "fail"
    """A reward that raises, hangs, ends its process or returns no finite number: `fail` ends the run; `skip_sample` leaves the
    sample out of the step; `score` gives `error_score`. The last two are counted and logged."""
    error_score: float = 0.0
    """Score of a failed reward with on_error=score."""
    timeout_s: float = 10.0
    """Longest call of a reward that runs in a process of its own (all but `exact_match` and `last_number`)."""
    workers: int = 1
    """Processes that run those rewards."""


@dataclass(frozen=True)
class ImportanceConfig:
    """Correction of the gap between the engine's and the trainer's log-probs of a sampled token: factors of the policy loss."""

    bound: Literal["none", "truncated", "masked"] = "none"
    """`truncated`: ratios above `cap` count as `cap` (TIS). `masked`: ratios outside `floor` to `cap` count as 0 (MIS). `none`:
    no correction."""
    level: Literal["token", "sequence"] = "token"
    """A ratio for each token, or the product over the response for all of its tokens."""
    cap: float = 2.0
    """Largest ratio."""
    floor: float = 0.0
    """Smallest ratio; with `masked` only."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """What is learnt from a batch. docs/algorithms.md has recipes and formulas."""

    advantages: Literal["gae", "grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"] = "gae"
    """How much better than expected a token was: `gae` by a critic (PPO); the others without one. `grpo`, `rloo` and
    `reinforce_plus_plus_baseline` compare the rollout.n responses to a prompt, `remax` with a greedy response to it."""
    gamma: float = 1.0
    """Discount of `gae` and `reinforce_plus_plus`."""
    gae_lambda: float = 0.95
    """Lambda of GAE."""
    normalize_by_std: bool = True
    """Divide GRPO's advantages by the standard deviation of the group; false: Dr. GRPO."""
    whiten_advantages: bool | None = None
    """Whiten the advantages over all valid tokens of the batch; default: with `gae` and the two `reinforce_plus_plus`."""
    policy_loss: Literal["ppo", "gspo", "cispo"] = "ppo"
    """`ppo`: clipped token ratios. `gspo`: one ratio a response. `cispo`: the ratio is clipped, no token loses its gradient."""
    clip_range: float = 0.2
    """Clip of the probability ratio, downwards, and upwards where `clip_range_high` is not given."""
    clip_range_high: float | None = None
    """Clip of the ratio upwards (clip-higher)."""
    dual_clip: float | None = None
    """Bound of the loss of tokens with a negative advantage, as a multiple of it, e.g. 3; with `ppo` only."""
    loss_aggregation: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "constant_length"] | None = None
    """What the policy loss is a mean of: all valid tokens of the optimizer batch; responses, of which each counts the sum or the
    mean of its tokens; or responses over `loss_length` (Dr. GRPO). Default: `token_mean`, with `gspo` `seq_mean_token_mean`."""
    loss_length: int | None = None
    """Tokens that a response is divided by with `constant_length`; default: rollout.max_new_tokens."""
    kl_coef: float = 0.0
    """Coefficient of the KL penalty in the token rewards (k1 estimate: log pi - log ref)."""
    kl_target: float | None = None
    """KL that `kl_coef` is adapted to, step by step; default: it stays as it is."""
    kl_gain: float = 0.1
    """How fast: the coefficient changes by at most a fifth of this part in a step."""
    kl_loss_coef: float = 0.0
    """Coefficient of the KL to the reference as a term of the loss (GRPO's place for it)."""
    kl_loss: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of that term: `k3` is GRPO's, `k2` has the gradient of the KL that the penalty has; `k1` pulls nowhere."""
    importance: ImportanceConfig = field(default_factory=ImportanceConfig)
    """Correction of the gap between engine and trainer."""
    dynamic_sampling_rounds: int = 0
    """DAPO's dynamic sampling: prompts whose responses all score alike are left out, and others sampled in their place, in up to
    so many rounds a step; then the step trains on what it has. 0: off."""
