"""What runs on the ranks of the pool's workers: small functions that build a role and use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megappo.actor.actor import Actor, Policy
from megappo.algorithms.aggregation import loss_weights
from megappo.checkpoint.load import load_weights
from megappo.config.schema_learning import AlgorithmConfig
from megappo.config.schema_models import OptimizerConfig
from megappo.critic.critic import Critic
from megappo.models.families import shape_of
from megappo.models.gpt import DTYPES, GPTChunk, build_chunks
from megappo.models.microbatch import MicroBatching
from megappo.models.pipeline_model import PipelineModel, Trainee
from megappo.parallel_state.groups import RoleGroups, create_role_groups
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.mapping import chunk_pieces
from tests.distributed.ways import Way

Layout = dict[str, Any]
OF_THE_CHUNKS = ("sequence_parallel", "log_probs_from")
"""What a test's layout says to `build_chunks`; the rest goes to ParallelLayout."""


def layout_for(folder: Path, layout: Layout) -> ParallelLayout:
    degrees = {k: v for k, v in layout.items() if k not in OF_THE_CHUNKS}
    return ParallelLayout(num_layers=shape_of(folder).num_layers, **degrees)


def load_model(
    folder: Path, groups: RoleGroups, layout: Layout, head: str = "lm", dtype: str = "float32", recompute: bool = False
) -> list[GPTChunk]:
    shape = shape_of(folder, head=head)
    with groups.active():
        ways = {name: layout[name] for name in OF_THE_CHUNKS if name in layout}
        chunks = build_chunks(shape, groups, DTYPES[dtype], recompute=recompute, **ways)
    load_weights(folder, chunks, groups)
    return chunks


def log_probs(folder: Path, layout: Layout, batch: dict[str, torch.Tensor], how: Way, temperature: float = 1.0) -> Any:
    """log_probs and entropy of this rank's rows, and their sample_ids; nothing off the last stage."""
    groups = create_role_groups({"actor": layout_for(folder, layout)}, seed=1)["actor"]
    model = PipelineModel(load_model(folder, groups, layout), groups, how.batching)
    rows, number = how.rows(groups, batch)
    found = Policy(model, temperature).compute_log_probs(rows, number)[0]
    return {**found, "sample_ids": rows["sample_ids"]} if found else {}


def one_update(
    folder: Path,
    layout: Layout,
    critic_layout: Layout | None,
    batch: dict[str, torch.Tensor],
    how: Way,
    optimizer: OptimizerConfig,
    steps: int = 1,
    algorithm: AlgorithmConfig | None = None,
) -> Any:
    """Actor and critic take `steps` updates. Returns (actor metrics, critic metrics, {role: pieces of this rank})."""
    roles = create_role_groups(
        {"actor": layout_for(folder, layout), "critic": layout_for(folder, critic_layout or layout)}, seed=1
    )
    models = {}
    for role, its_layout, head in (("actor", layout, "lm"), ("critic", critic_layout or layout, "value")):
        chunks = load_model(folder, roles[role], its_layout, head)
        models[role] = Trainee(chunks, roles[role], how.batching, optimizer, role)
    actor, critic = Actor(models["actor"], 1.0, algorithm or AlgorithmConfig(), 0.01), Critic(models["critic"], 0.2)
    for step in range(1, steps + 1):
        critic_metrics = critic.update(*how.rows(roles["critic"], batch), step)[1]
        actor_metrics = actor.update(*how.rows(roles["actor"], batch), step)[1]
    return actor_metrics, critic_metrics, {role: exported_pieces(model) for role, model in models.items()}


def log_probs_around_an_update(
    folder: Path, layout: Layout, batch: dict[str, torch.Tensor], how: Way, optimizer: OptimizerConfig
) -> Any:
    """(log-probs before, metrics of one PPO update, log-probs after it)."""
    groups = create_role_groups({"actor": layout_for(folder, layout)}, seed=1)["actor"]
    model = Trainee(load_model(folder, groups, layout), groups, how.batching, optimizer, "actor")
    actor = Actor(model, 1.0, AlgorithmConfig(), 0.0)
    rows, number = how.rows(groups, batch)
    before = actor.compute_log_probs(rows, number)[0]
    metrics = actor.update(rows, number, 1)[1]
    return before, metrics, actor.compute_log_probs(rows, number)[0]


def pack_multiples(folder: Path) -> list[int]:
    """What packs are padded to a multiple of: in float32, in bfloat16, and rows in bfloat16."""
    groups = create_role_groups({"actor": layout_for(folder, {})}, seed=1)["actor"]
    found = []
    for dtype, packed in (("float32", True), ("bfloat16", True), ("bfloat16", False)):
        chunks = load_model(folder, groups, {}, dtype=dtype)
        found.append(PipelineModel(chunks, groups, MicroBatching(packed=packed)).batching.length_multiple)
    return found


def values(folder: Path, layout: Layout, batch: dict[str, torch.Tensor], how: Way) -> Any:
    """Values by the model of a folder that has a score head."""
    groups = create_role_groups({"critic": layout_for(folder, layout)}, seed=1)["critic"]
    model = Trainee(load_model(folder, groups, layout, "value"), groups, how.batching, OptimizerConfig(decay_steps=1), "critic")
    return Critic(model, None).compute_values(*how.rows(groups, batch))[0]


def gradients(
    folder: Path, layout: Layout, batch: dict[str, torch.Tensor], how: Way, algorithms: list[AlgorithmConfig]
) -> list[Any]:
    """One update of the untouched actor by each algorithm. Returns for each (metrics, pieces of the gradient)."""
    groups = create_role_groups({"actor": layout_for(folder, layout)}, seed=1)["actor"]
    model = Trainee(
        load_model(folder, groups, layout), groups, how.batching, OptimizerConfig(lr=1e-30, clip_grad=0.0, decay_steps=1), "actor"
    )
    rows, number = how.rows(groups, batch)
    found = []
    for algorithm in algorithms:
        rows["loss_weight"], rows["share"] = loss_weights(
            rows["response_mask"], algorithm.loss_aggregation, algorithm.loss_length
        )
        metrics = Actor(model, 1.0, algorithm, 0.01).update(rows, number, 1)[1]
        found.append((metrics, exported_pieces(model, gradients=True)))
    return found


def exported_pieces(
    model: PipelineModel, gradients: bool = False
) -> list[tuple[str, tuple[int, ...], int, int, int, torch.Tensor]]:
    """(HF name, full shape, dim, start, stop, slice) of all that this rank would export, or of its gradient; dp 0 only."""
    groups, out = model.groups, []
    if groups.coordinates.dp:
        return out
    for i, chunk in enumerate(model.chunks):
        params = dict(chunk.named_parameters())
        if gradients:
            params = {name: param.main_grad for name, param in params.items()}
        for piece in chunk_pieces(model.shape, groups.layout, groups.coordinates.tp, groups.coordinates.pp, i):
            if piece.role == "owner":
                value = piece.local(params[piece.param].data).reshape(piece.shape).float().clone()
                out.append((piece.hf_name, piece.hf_shape, piece.dim, piece.start, piece.stop, value))
    return out


def assemble(by_rank: list[list[Any]]) -> dict[str, torch.Tensor]:
    """Complete HF tensors from the pieces of all ranks; a hole stays NaN."""
    tensors: dict[str, torch.Tensor] = {}
    for pieces in by_rank:
        for name, shape, dim, start, stop, value in pieces:
            tensors.setdefault(name, torch.full(shape, float("nan"))).narrow(dim, start, stop - start).copy_(value)
    return tensors


def first_update_after_scoring(folder: Path, layout: Layout, batch: dict[str, torch.Tensor], how: Way) -> Any:
    """Score the batch, then update on the same micro-batches: the ratio must be 1. Returns the update's metrics."""
    groups = create_role_groups({"actor": layout_for(folder, layout)}, seed=1)["actor"]
    model = Trainee(load_model(folder, groups, layout), groups, how.batching, OptimizerConfig(lr=1e-3, decay_steps=1), "actor")
    actor = Actor(model, 0.7, AlgorithmConfig(), 0.0)
    rows, number = how.rows(groups, batch)
    scored = actor.compute_log_probs(rows, number)[0]
    import torch.distributed as dist

    box = [scored]
    last = groups.layout.rank_of(tp=groups.coordinates.tp, dp=groups.coordinates.dp, pp=groups.layout.pp - 1)
    dist.broadcast_object_list(box, src=last, group=groups.pp_group)
    return actor.update({**rows, "old_log_probs": box[0]["log_probs"]}, number, 1)[1]


def vocab_parallel(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, weights: torch.Tensor) -> Any:
    """This rank's columns of the padded vocabulary. Returns (log_probs, entropy, gradient of the columns)."""
    import torch.distributed as dist

    from megappo.models.vocab_parallel import VocabularyShard, vocab_parallel_log_probs_and_entropy

    columns = logits.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(
        columns, labels, VocabularyShard(vocab_size, dist.get_rank(), dist.group.WORLD)
    )
    (log_probs * weights[0] + entropy * weights[1]).sum().backward()
    return log_probs.detach(), entropy.detach(), columns.grad


def megatron_coordinates(layouts: list[Layout], num_layers: int) -> Any:
    """For each layout what megatron says of this rank: (tp, dp, pp, tp group, pp group, dp group)."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    out = []
    for layout in layouts:
        groups = create_role_groups({"a": ParallelLayout(num_layers=num_layers, **layout)}, seed=1)["a"]
        with groups.active():
            found = [dist.get_process_group_ranks(g) for g in (groups.tp_group, groups.pp_group, groups.dp_group)]
            place = (
                mpu.get_tensor_model_parallel_rank(),
                mpu.get_data_parallel_rank(),
                mpu.get_pipeline_model_parallel_rank(),
            )
            out.append((place, found))
    return out


def wrong_groups(folder: Path) -> str:
    """Using a model under another role's groups must fail, not compute garbage."""
    roles = create_role_groups({"actor": layout_for(folder, {"pp": 2}), "critic": layout_for(folder, {"tp": 2})}, seed=1)
    model = PipelineModel(load_model(folder, roles["actor"], {"pp": 2}), roles["actor"], MicroBatching())
    try:
        with roles["critic"].active():
            model.score({}, 1, lambda output, micro_batch: {})
    except (RuntimeError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
