"""How does a model become this rank's Megatron chunks? `build_chunks` makes a `GPTChunk` for each virtual stage.

legend: s tokens of a row, b rows, n scored tokens, h hidden size, t tensor-parallel degree
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from torch import Tensor, nn

from megappo.models.layers import CausalAttention, PositionRotary, RMSNorm
from megappo.models.shape import ModelShape
from megappo.models.value_head import ValueHead
from megappo.parallel_state.device import device, has_cuda
from megappo.parallel_state.groups import RoleGroups
from megappo.parallel_state.layout import ParallelLayout
from megappo.parallel_state.mcore_compat import local_layer_spec, only_known

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

LogProbsFrom = Literal["logits", "hidden_states"]


class GPTChunk(GPTModel):  # type: ignore[misc]
    """One pipeline chunk. The first embeds, the last scores the tokens that it is asked for, and only those.

    forward's result: hidden states (s, b, h), or from the last chunk logits (n, padded vocabulary / t) or values (n,). With
    log_probs_from="hidden_states" the last chunk leaves the output layer to `PolicyHead` and returns the scored tokens' (n, h).
    """

    def __init__(self, *args: Any, shape: ModelShape, log_probs_from: LogProbsFrom, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shape = shape
        self.log_probs_from = log_probs_from
        self.rotary_pos_emb = PositionRotary(shape)
        self._scored: Tensor | None = None
        if self.post_process:
            if shape.head == "value":
                del self.output_layer
                self.value_head = ValueHead(shape.hidden_size)
            else:
                # The sequence is gathered here, before the scored tokens are picked; the layer must not gather once more.
                self.output_layer.sequence_parallel = False
                self.output_layer.allreduce_dgrad = self.config.tensor_model_parallel_size > 1

    def forward(self, input_ids: Tensor, positions: Tensor, attention: Tensor, scored: Tensor) -> Tensor:
        """input_ids, positions: (b, s) int64. attention: sequence lengths (packed) or bool mask (b, s) (padded), see layers.py.
        scored: (n,) int64, index into the (s, b) grid of the tokens whose next-token logits (or values) are wanted."""
        self.rotary_pos_emb.positions = positions
        self._scored = scored
        out: Tensor = super().forward(input_ids=input_ids, position_ids=positions, attention_mask=attention)
        return out

    def forget_pass(self) -> None:
        """Let go of what the last pass left here: the activations that came from the stage before, positions, indices."""
        self.set_input_tensor(None)
        self.rotary_pos_emb.positions = self._scored = None

    def _postprocess(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Called by GPTModel.forward behind the decoder."""
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        assert self._scored is not None
        picked = hidden_states.flatten(0, 1)[self._scored]
        if self.shape.head == "value":
            values: Tensor = self.value_head(picked)
            return values
        if self.log_probs_from == "hidden_states":
            return picked
        logits, _ = self.output_layer(picked.unsqueeze(1), weight=self.head_weight())
        picked_logits: Tensor = logits.squeeze(1)
        return picked_logits

    def head_weight(self) -> Tensor:
        """(padded vocabulary / t, h): this rank's rows of the last chunk's output layer; tied, they are the embedding's."""
        is_tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if is_tied else self.output_layer.weight
        return weight

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Where each parameter belongs in the whole model, for checkpoints. LanguageModule's own looks for an output layer."""
        if self.post_process and self.shape.head == "value":
            return MegatronModule.sharded_state_dict(self, *args, **kwargs)
        return super().sharded_state_dict(*args, **kwargs)


def transformer_config(
    shape: ModelShape, layout: ParallelLayout, dtype: torch.dtype, *, sequence_parallel: bool, recompute: bool
) -> TransformerConfig:
    """Megatron's config of this model. Gradients are sums, divided once by the token count (calculate_per_token_loss)."""
    optional = only_known(
        TransformerConfig,
        moe_token_dispatcher_type="alltoall",  # variable_seq_lengths asks for it, also from dense models
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.norm_eps,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=shape.mlp_bias,  # of all layers; build_chunks sets those of attention right
        qk_layernorm=shape.qk_norm,  # makes megatron sum the norms' gradients over tp, whose ranks see other heads
        window_size=None if shape.sliding_window is None else (shape.sliding_window - 1, 0),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        pipeline_model_parallel_layout=megatron_layout(layout) if layout.pp > 1 else None,
        sequence_parallel=sequence_parallel and layout.tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        calculate_per_token_loss=True,
        # Every parameter comes from a model folder; all that megatron could fuse needs CUDA extensions.
        perform_initialization=False,
        use_cpu_initialization=not has_cuda(),
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        # With two stages the next and the previous one are the same rank: the batched exchange would swap unequal shapes.
        batch_p2p_comm=False,
        overlap_p2p_comm=layout.vpp > 1,
        **optional,
    )


def megatron_layout(layout: ParallelLayout) -> list[list[str]]:
    """Our layer table in megatron's terms: chunk-major rows of layer kinds, so that no offset is computed twice."""
    return [
        ["embedding"] * held.has_embedding + ["decoder"] * len(held.layers) + ["loss"] * held.has_head
        for chunk in range(layout.vpp)
        for held in (row[chunk] for row in layout.table)
    ]


def build_chunks(
    shape: ModelShape,
    groups: RoleGroups,
    dtype: torch.dtype,
    *,
    sequence_parallel: bool = False,
    recompute: bool = False,
    log_probs_from: LogProbsFrom = "logits",
) -> list[GPTChunk]:
    """This rank's chunks, parameters not yet filled, in the order of the virtual stages. Call inside `groups.active()`.

    log_probs_from: what the last chunk of a language model returns, see GPTChunk."""
    assert groups.is_active, "models are built inside groups.active()"
    layout = groups.layout
    config = transformer_config(shape, layout, dtype, sequence_parallel=sequence_parallel, recompute=recompute)
    spec = local_layer_spec(normalization="RMSNorm")
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = CausalAttention
    attention.linear_qkv = _with_bias(ColumnParallelLinear, shape.qkv_bias)
    attention.linear_proj = _with_bias(RowParallelLinear, shape.proj_bias)
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    chunks = []
    for chunk in range(layout.vpp):
        stage = groups.coordinates.pp
        model = GPTChunk(
            config,
            _block_spec(spec, config, chunk if layout.vpp > 1 else None),
            shape=shape,
            log_probs_from=log_probs_from,
            vocab_size=shape.padded_vocab_size(layout.tp),
            max_sequence_length=shape.max_positions,
            pre_process=layout.holds_embedding(stage, chunk),
            post_process=layout.holds_head(stage, chunk),
            share_embeddings_and_output_weights=shape.tied and shape.head == "lm",
            position_embedding_type="rope",
            rotary_base=int(shape.rope_theta),
            vp_stage=chunk if layout.vpp > 1 else None,
        ).to(device())
        _mark_tensor_parallel(model)
        built = [layer.layer_number - 1 for layer in model.decoder.layers]
        if built != list(layout.layers(stage, chunk)):
            raise RuntimeError(
                f"megatron built layers {built} on stage {stage} chunk {chunk}, the layout says {layout.layers(stage, chunk)}"
            )
        chunks.append(model)
    return chunks


def _with_bias(layer: type[nn.Module], has_bias: bool) -> type[nn.Module]:
    """The layer with or without a bias, whatever megatron asks for: it has one switch for all layers (add_bias_linear), and
    models have biases in attention or in the MLP alone."""

    class Layer(layer):  # type: ignore[valid-type,misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **(kwargs | {"bias": has_bias}))

    return Layer


def _mark_tensor_parallel(model: GPTChunk) -> None:
    """Say which parameters are shards. Megatron does so while it initializes them, which we skip; without the mark a shard of
    tp rank 1 is taken for a copy and left out of the gradient norm."""
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            if module.weight is not None and not getattr(module.weight, "tensor_model_parallel", False):
                set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dim, stride=1)


def _block_spec(layer_spec: Any, config: TransformerConfig, vp_stage: int | None) -> Any:
    """The layers of one chunk, with our norm at the end of the last one (megatron's local norm refuses sequence parallel)."""
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    count = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer_spec] * count, layer_norm=RMSNorm)
