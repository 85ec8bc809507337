"""What can a user set? Typed, frozen dataclasses; the docstring under a field is its documentation. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megappo.config.schema_learning import AlgorithmConfig, DataConfig, RewardConfig
from megappo.config.schema_models import ActorConfig, CriticConfig, DType, ModelConfig, ReferenceConfig


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
