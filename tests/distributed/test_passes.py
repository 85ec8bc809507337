"""What a pass must not depend on, and what an update must equal: independent answers from transformers and plain autograd."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megappo.actor.actor import Actor
from megappo.config.schema_learning import AlgorithmConfig
from megappo.config.schema_models import OptimizerConfig
from megappo.models.pipeline_model import Trainee
from megappo.parallel_state.groups import create_role_groups
from megappo.parallel_state.layout import ParallelLayout
from tests.distributed import bodies
from tests.distributed.test_parity import world
from tests.distributed.ways import Way
from tests.models import PLAIN_ADAM, make_batch, transformers_update
from tests.pool import Pool

pytestmark = pytest.mark.distributed

ONE: dict[str, Any] = {}
PIPELINE: dict[str, Any] = {"pp": 2, "vpp": 2}


def scored(pool: Pool, folder: Path, layout: dict[str, Any], batch: dict[str, torch.Tensor], how: Way) -> torch.Tensor:
    return pool.run(world(layout), bodies.log_probs, folder, layout, batch, how)[-1]["log_probs"]


@pytest.mark.parametrize("layout", [{"pp": 2}, PIPELINE, {"pp": 4}], ids=["pp2", "pp2_vpp2", "pp4"])
def test_micro_batches_of_unequal_lengths_go_through_the_pipeline(pool: Pool, llama_folder: Path, layout: dict[str, Any]) -> None:
    batch = make_batch([2, 4, 1, 1], [3, 5, 2, 1])
    want = scored(pool, llama_folder, ONE, batch, Way(size=1))
    torch.testing.assert_close(scored(pool, llama_folder, layout, batch, Way(size=1)), want, atol=1e-5, rtol=0)


def test_sequences_of_a_pack_do_not_see_each_other(pool: Pool, llama_folder: Path) -> None:
    batch = make_batch([2, 3], [1, 2])
    other = {name: value.clone() for name, value in batch.items()}
    other["input_ids"][0, 3] = (batch["input_ids"][0, 3] + 1 - 3) % 58 + 3  # the first sample's last token
    before = scored(pool, llama_folder, ONE, batch, Way(size=2))
    after = scored(pool, llama_folder, ONE, other, Way(size=2))
    assert torch.equal(before[1], after[1])
    assert not torch.equal(before[0], after[0])


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_padding_changes_nothing(pool: Pool, llama_folder: Path, packed: bool) -> None:
    batch = make_batch([5, 2, 7], [4, 6, 1])
    together = scored(pool, llama_folder, ONE, batch, Way(size=3, packed=packed))
    alone = {name: value[1:2] for name, value in batch.items()}
    wide = {
        **{name: torch.nn.functional.pad(value, (0, 10)) for name, value in batch.items()},
    }
    torch.testing.assert_close(
        scored(pool, llama_folder, ONE, alone, Way(size=1, packed=packed))[0], together[1], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        scored(pool, llama_folder, ONE, wide, Way(size=3, packed=packed))[:, :6], together, atol=1e-5, rtol=0
    )


def test_right_padded_prompts_give_what_left_padded_ones_give(pool: Pool, llama_folder: Path) -> None:
    batch = make_batch([5, 2], [3, 3])
    moved = {name: value.clone() for name, value in batch.items()}
    moved["input_ids"][1, :5] = torch.tensor([*batch["input_ids"][1, 3:5].tolist(), 0, 0, 0])
    moved["attention_mask"][1, :5] = torch.tensor([True, True, False, False, False])
    for packed in (True, False):
        how = Way(size=2, packed=packed)
        torch.testing.assert_close(
            scored(pool, llama_folder, ONE, moved, how), scored(pool, llama_folder, ONE, batch, how), atol=1e-5, rtol=0
        )


def test_packs_of_bfloat16_come_in_few_lengths_on_a_cpu(pool: Pool, llama_folder: Path) -> None:
    """oneDNN keeps a compiled kernel for each length that it meets."""
    assert pool.run(1, bodies.pack_multiples, llama_folder)[0] == [1, 64, 1]


@pytest.mark.parametrize("layout", [ONE, PIPELINE, {"tp": 2, "pp": 2}], ids=["one", "pp2_vpp2", "tp2_pp2"])
def test_the_ratio_is_one_at_the_first_mini_batch(pool: Pool, llama_folder: Path, layout: dict[str, Any]) -> None:
    batch = make_batch([5, 2, 7, 3], [4, 6, 1, 5])
    results = pool.run(world(layout), bodies.first_update_after_scoring, llama_folder, layout, batch, Way(size=2))
    metrics = results[-1]
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["clipfrac"] == 0.0
    assert metrics["approx_kl"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("layout", [ONE, PIPELINE], ids=["one", "pp2_vpp2"])
def test_an_update_equals_plain_autograd_and_adam_on_transformers(pool: Pool, llama_folder: Path, layout: dict[str, Any]) -> None:
    batch = make_batch([5, 1, 3, 3], [2, 4, 1, 6])
    results = pool.run(world(layout), bodies.one_update, llama_folder, layout, None, batch, Way(size=2), PLAIN_ADAM)
    got = bodies.assemble([r[2]["actor"] for r in results])
    model, norm = transformers_update(llama_folder, batch, PLAIN_ADAM, entropy_coef=0.01)
    assert results[-1][0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, want in model.state_dict().items():
        assert ((got[name] - want).norm() / want.norm()).item() <= 1e-5, name


def rates(folder: Path, optimizer: OptimizerConfig, batch: dict[str, torch.Tensor], steps: list[int]) -> list[float]:
    """The learning rate that an actor's updates had at these steps of a run."""
    groups = create_role_groups({"actor": bodies.layout_for(folder, ONE)}, seed=1)["actor"]
    model = Trainee(bodies.load_model(folder, groups, ONE), groups, Way().batching, optimizer, "actor")
    actor = Actor(model, 1.0, AlgorithmConfig(), 0.0)
    rows, number = Way().rows(groups, batch)
    return [float(actor.update(rows, number, step)[1]["lr"]) for step in steps]


def test_updates_have_the_learning_rate_of_their_step(pool: Pool, llama_folder: Path) -> None:
    optimizer = OptimizerConfig(lr=1e-3, min_lr_ratio=0.1, warmup_steps=3, decay_steps=9, decay="cosine")
    steps = [1, 3, 4, 4, 7, 9, 10, 30]  # several mini-batches of a step, steps without an update, and past the end
    (found,) = pool.run(1, rates, llama_folder, optimizer, make_batch([2], [2]), steps)
    assert found == pytest.approx([1e-3 / 3, 1e-3, 9.397114e-4, 9.397114e-4, 3.25e-4, 1e-4, 1e-4, 1e-4], rel=1e-6)


@pytest.mark.parametrize("ranks", [2, 4])
def test_vocabulary_shards_give_the_whole_vocabulary_answer(pool: Pool, ranks: int) -> None:
    torch.manual_seed(0)
    logits, labels, weights = torch.randn(9, 128) * 3, torch.randint(0, 61, (9,)), torch.randn(2, 9)
    whole = logits[:, :61].double().requires_grad_()
    log_p = whole.log_softmax(-1)
    want, want_entropy = log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    (want * weights[0] + want_entropy * weights[1]).sum().backward()
    results = pool.run(ranks, bodies.vocab_parallel, logits, labels, 61, weights)
    for log_probs, entropy, _ in results:
        torch.testing.assert_close(log_probs, want.float(), atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, want_entropy.float(), atol=1e-5, rtol=0)
    gradient = torch.cat([r[2] for r in results], dim=1)
    torch.testing.assert_close(gradient[:, :61], whole.grad.float(), atol=1e-5, rtol=0)
    assert gradient[:, 61:].abs().max() == 0  # padded columns get nothing


def test_our_rank_arithmetic_is_megatrons(pool: Pool) -> None:
    layouts: list[dict[str, Any]] = [
        {"tp": 4}, {"pp": 4}, {"dp": 4}, {"tp": 2, "pp": 2}, {"tp": 2, "dp": 2}, {"dp": 2, "pp": 2}, {"dp": 2, "pp": 2, "vpp": 2},
    ]  # fmt: skip
    for rank, found in enumerate(pool.run(4, bodies.megatron_coordinates, layouts, 8)):
        for arguments, (place, groups) in zip(layouts, found, strict=True):
            layout = ParallelLayout(num_layers=8, **arguments)
            at = layout.coordinates(rank)
            assert place == (at.tp, at.dp, at.pp), arguments
            assert groups == [layout.group_of(rank, "tp"), layout.group_of(rank, "pp"), layout.group_of(rank, "dp", "cp")], (
                arguments
            )


def test_a_model_under_another_roles_groups_is_refused(pool: Pool, llama_folder: Path) -> None:
    for message in pool.run(2, bodies.wrong_groups, llama_folder):
        assert message != "no error"
