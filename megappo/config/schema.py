"""What can a user set? Typed, frozen dataclasses; the docstring under a field is its documentation. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole."""

    name: str = "run"
    """Name of the run; its folder is `{dir}/{name}`."""
    dir: str = "runs"
    """Folder that holds the run folders."""
    seed: int = 1234
    """Seed of everything random: data order, samples, initial weights."""
    launcher: Literal["auto", "local", "torchrun"] = "auto"
    """`local`: this command starts the ranks itself. `torchrun`: join the ranks that torchrun (or a launcher that sets the
    same variables) has started. `auto`: torchrun where RANK and WORLD_SIZE are set, else local."""
    watchdog_s: float = 60.0
    """Seconds without a sign of life from a rank after which the run ends."""
    threads_per_rank: int = 1
    """CPU threads of each rank. More than one costs speed wherever ranks share cores."""
    trackers: tuple[Literal["tensorboard"], ...] = ()
    """Where metrics go besides metrics.jsonl: `tensorboard` writes event files to `tensorboard/` in the run folder."""


@dataclass(frozen=True)
class ModelConfig:
    """The model that is trained."""

    path: str = "???"
    """Hugging Face folder (config.json, safetensors, tokenizer), or a checkpoint; a step folder of a run stands for its actor."""
    tokenizer: str | None = None
    """Folder or sentencepiece `.model` file of the tokenizer; default: `path`."""
    dtype: DType = "float32"
    """Dtype of parameters and computation while training. bfloat16 keeps float32 master weights in the optimizer."""


@dataclass(frozen=True)
class ParallelConfig:
    """Parallel degrees. Ranks that train = tp x cp x pp x dp."""

    tp: int = 1
    """Tensor parallel degree."""
    pp: int = 1
    """Pipeline parallel degree (stages)."""
    vpp: int = 1
    """Virtual pipeline chunks on each stage (Megatron's interleaved schedule)."""
    cp: int = 1
    """Context parallel degree."""
    ep: int = 1
    """Expert parallel degree."""
    dp: int = 1
    """Data parallel degree."""
    layers_per_stage: tuple[int, ...] | None = None
    """Layers of each stage where they are not even, e.g. [8, 8, 7, 7]. Of this, `num_layers_in_...`, `account_for_...` and
    `pipeline_model_parallel_layout` one can be given."""
    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first stage; the stages after it share the rest evenly."""
    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last stage; the stages before it share the rest evenly. Goes together with the key before."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer of an even split."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the head and the loss as one layer of an even split. Goes together with the key before."""
    pipeline_model_parallel_layout: str | None = None
    """The whole split in Megatron's words, e.g. `Et*3|(tt|)*6ttL`: `|` between chunks (all stages' first chunks, then all stages'
    second ones), E embedding, t layer, L head and loss, x*n and (..)*n for repeats. A chunk may hold no layer."""
    sequence_parallel: bool = False
    """Cut the activations between the tensor-parallel regions along the sequence (Megatron's sequence parallel)."""


@dataclass(frozen=True)
class OptimizerConfig:
    """Adam over Megatron's optimizer and parameter scheduler."""

    lr: float = 1e-6
    """Learning rate after warm-up."""
    min_lr_ratio: float = 1.0
    """Learning rate at the end of the decay, as a part of `lr`."""
    warmup_steps: int = 0
    """Trainer steps of linear warm-up from 0."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay from `lr` to `min_lr_ratio * lr`."""
    decay_steps: int | None = None
    """Trainer step at which the decay ends; default: the last step of the run."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's beta1 and beta2."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay (not on norms and biases)."""
    clip_grad: float = 1.0
    """Global gradient norm limit; 0 turns clipping off."""
    distributed: bool = False
    """Megatron's distributed optimizer: optimizer state cut over the data-parallel ranks."""


@dataclass(frozen=True)
class UpdateConfig:
    """Batches and passes that actor and critic share."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Layout of this model."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """Optimizer of this model."""
    mini_batch_size: int = 64
    """Samples of one optimizer step, over all data-parallel ranks."""
    micro_batch_size: int = 8
    """Samples of one pipeline micro-batch on one data-parallel rank."""
    micro_batch_tokens: int | None = None
    """Token budget of a micro-batch. Where set, micro-batches are formed by tokens and `micro_batch_size` is not used."""
    score_micro_batch_tokens: int | None = None
    """Token budget of a micro-batch in passes without gradients, which need less memory; default: `micro_batch_tokens`."""
    balance: Literal["tokens", "flops"] = "tokens"
    """What is made equal between data-parallel ranks and between micro-batches: `flops` counts attention, too, which grows with
    the square of the length."""
    epochs: int = 1
    """Passes over the batch in each step."""
    packed: bool = True
    """Pack the samples of a micro-batch into one row without padding; false: a padded row for each sample."""
    recompute: bool = False
    """Recompute the activations of each layer in the backward pass instead of keeping them."""


@dataclass(frozen=True)
class ActorConfig(UpdateConfig):
    """The policy."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss."""
    log_probs_from: Literal["logits", "hidden_states"] = "logits"
    """Where log-probs and entropy of actor and reference come from. `hidden_states`: chunk by chunk over the vocabulary, so that
    the logits of a micro-batch are never in memory; they are computed again in the backward pass."""


@dataclass(frozen=True)
class CriticConfig(UpdateConfig):
    """The value model, where algorithm.advantages=gae. Its layout follows the actor's unless `critic.parallel` is given."""

    parallel: ParallelConfig | None = None  # type: ignore[assignment]
    """Layout of the critic in the same ranks; default: the actor's."""
    path: str | None = None
    """Hugging Face folder or checkpoint that the critic starts from; on a language model its head starts at 0. Default:
    model.path."""
    start: Literal["weights", "fresh"] = "weights"
    """`weights`: those of `path`. `fresh`: random ones, seeded by run.seed, of a model of the sizes of `path`."""
    value_clip_range: float | None = None
    """Clip of the value's change in the value loss; none: no clip."""
    warmup_steps: int = 0
    """Steps at the start of a run in which only the critic is trained, so that the actor does not learn from values that mean
    nothing yet."""


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen policy that the KL is measured against. It is built where the algorithm uses it or `enabled` says so."""

    enabled: bool | None = None
    """Whether the reference's log-probs are computed; default: where algorithm.kl_coef or algorithm.kl_loss_coef is not 0."""
    parallel: ParallelConfig | None = None
    """Layout of the reference in the same ranks; default: the actor's."""
    path: str | None = None
    """Hugging Face folder or checkpoint of the reference; default: model.path."""


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


@dataclass(frozen=True)
class RolloutConfig:
    """Generation."""

    engine: Literal["vllm", "hf"] = "vllm"
    """`vllm`, or `hf` (transformers' generate: slow, for a machine without vLLM)."""
    tp: int = 1
    """Tensor parallel degree of each engine."""
    engines: int = 1
    """Number of engines that share the prompts; of each step, and of validation. They are spread evenly over the ranks, the first
    on rank 0, so that each host of several has its own. Samples do not depend on how many there are."""
    own_ranks: bool = False
    """Give each engine a rank that only generates, after the ranks that train: the world grows by `engines`."""
    n: int = 1
    """Responses a prompt."""
    temperature: float = 1.0
    """Sampling temperature; log-probs and entropy in training use the same."""
    top_p: float = 1.0
    """Nucleus sampling."""
    top_k: int = -1
    """Top-k sampling; -1: off."""
    max_new_tokens: int = 64
    """Longest response, the end-of-sequence token included."""
    max_prompt_tokens: int = 512
    """Longest prompt."""
    dtype: DType | None = None
    """Dtype of the engine; default: model.dtype."""
    logprob_tolerance: float | None = None
    """Largest difference between the engine's and the trainer's log-prob of a sampled token before the run stops; default: 1e-3
    where both sides are float32, 5e-2 otherwise."""
    max_num_seqs: int = 128
    """Sequences that the engine runs at once."""
    kv_cache_bytes: int = 268435456
    """Bytes of the engine's KV cache on a CPU."""
    gpu_memory_utilization: float = 0.4
    """Share of a GPU's memory that the engine takes, weights and KV cache together (vLLM's option of this name)."""
    threads: int = 1
    """CPU threads of each engine process."""


@dataclass(frozen=True)
class WeightsConfig:
    """The hand-over of weights from training to generation (pp_weights)."""

    gather: Literal["full", "pp"] = "full"
    """`full`: complete tensors are gathered over pp and tp. `pp`: only over pp; each of vLLM's workers gets the shard of its tp
    rank, with rollout.tp = actor.parallel.tp."""
    mode: Literal["auto", "full", "bucketed"] = "auto"
    """`full`: the whole model in one buffer. `bucketed`: a stream of buckets of `bucket_bytes`, of which two are in memory; one
    is gathered while the engine loads the other. `auto`: bucketed where the full buffer would take more than a quarter of the
    free memory."""
    bucket_bytes: int = 536870912
    """Size of a bucket. A larger tensor is cut between its rows and put together again by the engine."""
    transport: Literal["auto", "shared_memory", "collective", "cuda_ipc"] = "auto"
    """`shared_memory`: each rank writes its slices into one buffer (one host). `collective`: gather over the process groups.
    `cuda_ipc`: as collective, and the engine reads the GPU memory of the rank that has gathered (one host; not run on a GPU yet).
    `auto`: shared memory where all ranks are on one host, else collective."""
    to_engines: Literal["auto", "shared_memory", "broadcast"] = "auto"
    """How weights reach engines on other ranks than rank 0. `shared_memory`: they read rank 0's memory (one host). `broadcast`:
    the bytes come over gloo, into memory of their own. `auto`: for each engine, shared memory where it is on rank 0's host."""
    verify_every: int = 1
    """Verify the checksums of every k-th hand-over on the receiving side; 0: never."""
    alignment_bytes: int = 16
    """Every tensor starts at a multiple of this."""
    zero_copy: bool = False
    """vLLM reads the weights in the buffer that they were published to, and keeps no copy of them; there are two buffers then,
    and a publish writes into the one that is not read. On a CPU, with rollout.tp=1, in the model's own dtype, in mode `full`. It
    saves the copy and the packing after each step, and vLLM computes without packed weights, which is slower."""


@dataclass(frozen=True)
class OffloadConfig:
    """What leaves the ranks' devices while the engine generates, in `megappo train`: of actor, critic and reference. It comes
    back where it is used. Worth it where engine and ranks share GPUs; on a CPU it costs memory and saves none. See
    docs/weights.md."""

    parameters: bool = False
    """Parameters go to the host, unless they have not changed since they were last there."""
    gradients: bool = False
    """The memory of the gradients is given back. Nothing is copied."""
    optimizer: bool = False
    """The optimizers' state and master weights go to the host."""


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
class TrainerConfig:
    """The loop."""

    steps: int = 100
    """Number of PPO steps."""
    batch_size: int = 128
    """Prompts a step."""
    max_skips: int = 3
    """An optimizer step whose loss or gradient is not finite, or without a valid token, is skipped on all ranks. The run ends
    once so many in a row are."""
    validate_every: int = 0
    """Validate greedily every k steps; 0: only before the first and after the last step where data.validation is given."""
    save_every: int = 0
    """Write actor and critic as checkpoints to checkpoints/step_000100/{actor,critic} every k steps, and the folder's name to
    checkpoints/latest; 0: never. The final actor is always written to `final/`, as a Hugging Face folder."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on data.validation: `megappo eval`, and the validation of a training run. Every row gets one greedy response."""

    samples: int = 0
    """Sampled responses a row besides the greedy one, for avg@k and pass@k; 0: greedy only."""
    temperature: float = 1.0
    """Sampling temperature of those."""
    top_p: float = 1.0
    """Nucleus sampling of those."""
    top_k: int = -1
    """Top-k sampling of those; -1: off."""
    pass_score: float = 1.0
    """Score from which on a response counts as passed, for pass@k."""
    max_rows: int | None = None
    """Use only the first rows of data.validation."""


@dataclass(frozen=True)
class SftConfig:
    """Supervised warm start (`megappo sft`): next-token loss on the answers of data.train."""

    steps: int = 300
    """Largest number of steps."""
    batch_size: int = 128
    """Samples a step."""
    evaluate_every: int = 0
    """Measure greedy accuracy on data.validation every k steps; 0: never."""
    stop_at_accuracy: float | None = None
    """Stop once the accuracy has reached this."""
    max_accuracy: float | None = None
    """Keep the last state whose accuracy was below this (for a warm start that leaves something to learn)."""
    output: str = "???"
    """Hugging Face folder that the result is written to."""


@dataclass(frozen=True)
class Config:
    """Everything."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    pp_weights: WeightsConfig = field(default_factory=WeightsConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    sft: SftConfig = field(default_factory=SftConfig)
