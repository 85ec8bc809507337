"""Does a Megatron model leave its device completely, and does training not notice? Runs with and without it, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.actor.actor import Actor, Policy
from megappo.checkpoint.load import load_weights
from megappo.config.schema_learning import AlgorithmConfig
from megappo.errors import RunFailed
from megappo.models.microbatch import MicroBatching
from megappo.models.pipeline_model import PipelineModel, Trainee
from megappo.parallel_state.groups import RoleGroups, create_role_groups
from megappo.pp_weights.manager import WeightManager
from megappo.pp_weights.offload import KINDS, ModelMemory, Moved
from tests.distributed.bodies import layout_for, load_model
from tests.distributed.ways import Way
from tests.models import PLAIN_ADAM, make_batch, make_llama_folder
from tests.pool import Pool
from tests.reachable import reachable_bytes

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "pp2 x vpp2": ({"pp": 2, "vpp": 2}, "float32", False),
    "tp2, bf16": ({"tp": 2}, "bfloat16", False),
    "dp2, distributed": ({"dp": 2}, "float32", True),
    "dp2, distributed, bf16": ({"dp": 2}, "bfloat16", True),
}
BATCH = make_batch([3, 5, 4, 6], [4, 5, 6, 3])
STEPS = 10
CONSTANTS = {"inv_freq", "_scale", "_scale_one", "_dummy_overflow_buf"}
"""Scalars of Megatron's optimizers, and the rotary frequencies, which live on the host."""


@dataclass
class Seen:
    """What a rank saw: per step (log-probs, metrics), the parameters at the end, what moved, what was left after an off-load."""

    results: list[Any]
    parameters: list[torch.Tensor]
    moved: list[Moved]
    left: list[dict[str, int]]
    resident: list[int]


def trainee(folder: Path, layout: dict[str, Any], dtype: str, distributed: bool) -> tuple[Trainee, RoleGroups]:
    groups = create_role_groups({"actor": layout_for(folder, layout)}, seed=1)["actor"]
    chunks = load_model(folder, groups, layout, dtype=dtype)
    optimizer = replace(PLAIN_ADAM, distributed=distributed)
    return Trainee(chunks, groups, MicroBatching(), optimizer, "actor"), groups


def train(folder: Path, layout: dict[str, Any], dtype: str, distributed: bool, offloads: bool) -> Seen:
    """Score, update and (with `offloads`) leave the device, ten times."""
    model, groups = trainee(folder, layout, dtype, distributed)
    roots = {"chunks": model.chunks, "runnable": model.runnable, "optimizer": model.optimizer}
    actor, memory = Actor(model, 1.0, AlgorithmConfig(), 0.01), ModelMemory(model.tensors)
    model.onload = memory.onload
    rows, seen = Way().rows(groups, BATCH), Seen([], [], [], [], [])
    for step in range(1, STEPS + 1):
        if offloads:
            memory.offload(*KINDS)
            seen.moved.append(memory.moved)
            memory.moved = Moved()
            seen.left.append(reachable_bytes(**roots))
        log_probs = actor.compute_log_probs(*rows)[0]
        norm = model.parameter_norm()
        seen.results.append((log_probs, norm, actor.update(*rows, step)[1]))
        seen.resident.append(sum(reachable_bytes(**roots).values()))
    seen.parameters = [p.detach().clone() for chunk in model.chunks for p in chunk.parameters()]
    return seen


@pytest.fixture(scope="module", params=LAYOUTS)
def both(request: pytest.FixtureRequest, pool: Pool, tied_llama_folder: Path) -> tuple[list[Seen], list[Seen]]:
    """By rank: with and without off-loading."""
    layout, dtype, distributed = LAYOUTS[request.param]
    with_it, without = (pool.run(2, train, tied_llama_folder, layout, dtype, distributed, flag) for flag in (True, False))
    return with_it, without


def test_training_does_not_notice(both: tuple[list[Seen], list[Seen]]) -> None:
    for with_it, without in zip(*both, strict=True):
        torch.testing.assert_close(with_it.results, without.results, rtol=0, atol=0)
        assert all(torch.equal(a, b) for a, b in zip(with_it.parameters, without.parameters, strict=True))
        assert len({norm for _, norm, _ in with_it.results}) == STEPS  # the parameters did move


def test_nothing_that_model_or_optimizer_reach_keeps_its_bytes(both: tuple[list[Seen], list[Seen]]) -> None:
    for left in (left for seen in both[0] for left in seen.left):
        assert {path.rpartition(".")[2] for path in left} <= CONSTANTS
        assert max(left.values()) <= 64


def test_step_10_holds_and_moves_what_step_2_did(both: tuple[list[Seen], list[Seen]]) -> None:
    for with_it, without in zip(*both, strict=True):
        assert len(set(with_it.resident)) == 1
        assert with_it.resident == without.resident
        first, second, *later = [replace(moved, offload_s=0, onload_s=0) for moved in with_it.moved]
        gradients = first.dropped_bytes
        assert all(moved == replace(second, to_device_bytes=later[0].to_device_bytes) for moved in later)
        # The optimizer's state is there from the first update on; before it no byte of it moves. What left comes back.
        assert first.to_host_bytes < second.to_host_bytes
        assert second.to_device_bytes == first.to_host_bytes
        assert later[0].to_device_bytes == second.to_host_bytes
        # Everything but the gradients is copied, once.
        assert second.dropped_bytes == gradients
        constants = sum(with_it.left[1].values())
        assert second.to_host_bytes + gradients + constants == with_it.resident[0]


def frozen(folder: Path) -> tuple[list[Moved], list[Any]]:
    """Three rounds of scoring by a model that is never trained."""
    groups = create_role_groups({"reference": layout_for(folder, {"pp": 2})}, seed=1)["reference"]
    model = PipelineModel(load_model(folder, groups, {"pp": 2}), groups, MicroBatching())
    memory = ModelMemory(model.tensors)
    model.onload = memory.onload
    moved, scores = [], []
    for _ in range(3):
        moved.append(memory.offload(*KINDS))
        scores.append(Policy(model, 1.0).compute_log_probs(*Way().rows(groups, BATCH))[0])
    return moved, scores


def test_a_frozen_model_is_copied_to_the_host_once(pool: Pool, llama_folder: Path) -> None:
    for moved, scores in pool.run(2, frozen, llama_folder):
        num_bytes = moved[0].to_host_bytes
        assert num_bytes > 0
        assert [(m.to_host_bytes, m.dropped_bytes) for m in moved] == [(num_bytes, 0), (0, num_bytes), (0, num_bytes)]
        torch.testing.assert_close(scores[1:], scores[:2], rtol=0, atol=0)


def publishing(folder: Path, other_folder: Path, distributed: bool) -> Any:
    """What a manager says of off-loaded parameters; then versions published after each way in which parameters change."""
    model, groups = trainee(folder, {"dp": 2}, "float32", distributed)
    memory = ModelMemory(model.tensors)
    model.onload = memory.onload
    actor, rows = Actor(model, 1.0, AlgorithmConfig(), 0.0), Way().rows(groups, BATCH)
    with groups.active():
        manager = WeightManager(model.chunks, model.shape, groups, is_active=lambda: groups.is_active)
    checks = []

    def publish(version: int) -> None:
        """Off- and on-load, publish, and compare with the parameters as they were before."""
        norm = model.parameter_norm()
        memory.offload(*KINDS)
        memory.onload("parameters")
        with groups.active():
            buffer = manager.publish(version)
        if buffer is not None:
            published = sum(view.double().square().sum().item() for view in buffer.views().values()) ** 0.5
            checks.append((norm, published))

    publish(0)
    actor.update(*rows, 1)
    publish(1)
    memory.offload(*KINDS)
    refusals = []
    for attempt in (lambda: manager.publish(2), lambda: load_weights(other_folder, model.chunks, groups)):
        try:
            with groups.active():
                attempt()
        except RunFailed as error:
            refusals.append(str(error))
    moved = memory.onload("parameters", keep=False)
    load_weights(other_folder, model.chunks, groups)
    publish(2)
    for chunk in model.chunks:
        for param in chunk.parameters():
            param.data = param.data.clone() * 2
    publish(3)
    manager.close()
    return checks, refusals, moved.to_device_bytes


@pytest.mark.parametrize("distributed", [False, True])
def test_publishing_sees_every_change_and_refuses_what_is_away(
    pool: Pool, llama_folder: Path, tmp_path: Path, distributed: bool
) -> None:
    other = make_llama_folder(tmp_path / "other", tied=False, seed=8)
    answers = pool.run(2, publishing, llama_folder, other, distributed)
    for _, refusals, keep_false_bytes in answers:
        published, loaded = refusals
        assert published.endswith("is off-loaded; bring the parameters back first")
        assert loaded.startswith(f"{other} is not loaded: ")
        assert keep_false_bytes == 0
    checks = answers[0][0]
    assert [published for _, published in checks] == pytest.approx([norm for norm, _ in checks], rel=1e-6)
    norms = [norm for norm, _ in checks]
    assert len({round(norm, 4) for norm in norms}) == 4
    assert norms[3] == pytest.approx(2 * norms[2])
