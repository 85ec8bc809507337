"""How can models be laid out and trained? The sections `model`, `actor`, `critic` and `reference`. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DType = Literal["float32", "bfloat16"]


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
