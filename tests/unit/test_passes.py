"""Does each sample get back its own result, wherever it was sent, and does what only fills up count nowhere?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megappo.config.check import Plan
from megappo.config.schema import Config
from megappo.config.schema_models import ActorConfig, CriticConfig
from megappo.controller.dispatch import split_rows
from megappo.data.packing import plan_batch
from megappo.data.proto import DataProto
from megappo.models.shape import ModelShape
from megappo.parallel_state.layout import ParallelLayout
from megappo.trainer.batch import pad_batch
from megappo.trainer.passes import Passes

SHAPE = ModelShape("llama", 4, 8, 16, 2, 2, 4, 50, False, 1e-5, 1e4, 64)


class Workers:
    """Answers each token with its id and keeps what it was sent."""

    world_size = 1

    def __init__(self, answer: dict[str, Any] | None = None) -> None:
        self.answer = answer or {}
        self.sent: list[tuple[str, str, dict[str, Tensor], int, dict[str, Any]]] = []

    def call(self, role: str, method: str, /, tensors: Any = None, *, num_micro_batches: int = 0, **kwargs: Any) -> Any:
        self.sent.append((role, method, tensors, num_micro_batches, kwargs))
        width = tensors["response_mask"].shape[1]
        return {"log_probs": tensors["input_ids"][:, -width:].float() * tensors["response_mask"]}, dict(self.answer)

    def close(self) -> None: ...


def batch_of(lengths: list[int]) -> DataProto:
    """Samples of a prompt token and a response of these lengths, whose tokens are numbered through all samples."""
    first = [sum(lengths[:i]) + 1 for i in range(len(lengths))]
    return pad_batch([[1]] * len(lengths), [list(range(i, i + n)) for i, n in zip(first, lengths, strict=True)], pad_id=0)


def passes(workers: Workers, actor: ActorConfig, **degrees: int) -> Passes:
    layout = ParallelLayout(4, **degrees)
    plan = Plan(Config(actor=actor, critic=CriticConfig()), {"actor": SHAPE}, {"actor": layout, "critic": layout})
    return Passes(plan, workers)  # type: ignore[arg-type]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    dp=st.integers(1, 4),
    vpp=st.sampled_from([1, 2]),
    tokens=st.sampled_from([None, 10, 25]),
    balance=st.sampled_from(["tokens", "flops"]),
)
@settings(max_examples=80, deadline=None)
def test_results_come_back_to_their_samples(lengths: list[int], dp: int, vpp: int, tokens: int | None, balance: Any) -> None:
    batch, workers = batch_of(lengths), Workers()
    actor = ActorConfig(micro_batch_size=2, score_micro_batch_tokens=tokens, balance=balance)
    found = passes(workers, actor, dp=dp, pp=2, vpp=vpp).score("actor", "compute_log_probs", batch)
    want = torch.where(batch.batch["response_mask"], batch.batch["input_ids"][:, 1:], 0).float()
    assert torch.equal(found.batch["log_probs"], want)
    assert batch.batch["sample_ids"].tolist() == list(range(len(lengths)))  # the batch itself stays in its order

    ((_, _, sent, number, _),) = workers.sent
    rows = len(sent["sample_ids"])
    assert rows % dp == 0 and rows - len(lengths) < dp
    assert sorted(set(sent["sample_ids"].tolist())) == list(range(len(lengths)))
    assert sent["response_mask"].sum() == sum(lengths)  # rows that fill up have no token that counts
    assert number % (2 if vpp == 2 else 1) == 0
    for part in split_rows(rows, dp):
        for group in range(number):
            mine = sent["attention_mask"][part][sent["micro_batch"][part] == group]
            assert int(mine.sum()) <= tokens if tokens else len(mine) <= 2


def test_passes_without_gradients_have_a_budget_of_their_own() -> None:
    workers = Workers({"loss": 1.0})
    own = passes(workers, ActorConfig(micro_batch_tokens=8, score_micro_batch_tokens=16))
    batch = batch_of([7, 7, 7, 7])
    own.score("actor", "compute_log_probs", batch)
    metrics, reason = own.update("actor", batch, (), step=3)
    assert [number for _, _, _, number, _ in workers.sent] == [2, 4]
    assert workers.sent[1][4] == {"step": 3}
    assert reason is None
    assert metrics["loss"] == 1.0 and metrics["micro_batch_imbalance"] == 0.0


def test_an_update_without_a_valid_token_is_not_even_sent_and_one_that_ranks_skip_has_no_metrics() -> None:
    workers = Workers({"skipped": "loss not finite"})
    batch = batch_of([2, 3])
    assert passes(workers, ActorConfig()).update("actor", batch, (), step=1) == ({}, "loss not finite")
    batch.batch["response_mask"][:] = False
    assert passes(workers, ActorConfig()).update("actor", batch, (), step=1) == ({}, "no valid token")
    assert len(workers.sent) == 1


def test_only_the_named_columns_travel() -> None:
    workers = Workers()
    batch = batch_of([2, 3, 1])
    batch.batch["advantages"], batch.batch["returns"] = torch.ones(3, 3), torch.ones(3, 3)
    passes(workers, ActorConfig(), dp=2).update("actor", batch, ("advantages",), step=1)
    sent = workers.sent[0][2].keys()
    assert sent == {*("input_ids", "attention_mask", "response_mask", "sample_ids", "advantages", "micro_batch", "row_mask")}


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_role_is_cut_as_its_own_section_says(role: str) -> None:
    workers = Workers()
    batch = batch_of([1, 1, 1, 1, 1, 1, 1, 1])
    passes(workers, ActorConfig(micro_batch_size=4)).score(role, "score", batch)
    assert workers.sent[0][3] == (2 if role == "actor" else 8 // CriticConfig().micro_batch_size)


def test_ranks_are_made_equal_in_tokens_or_in_flops() -> None:
    """Lengths at which both differ, and FLOPs with and without the embedding, which is looked up and not multiplied."""
    lengths = [58, 1, 3, 35, 4, 34]
    layer = 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8  # q, k, v, o; gate, up, down; two norms
    parameters = 4 * layer + 8 + 50 * 8  # final norm, head
    flops = [2 * parameters * n + 2 * 4 * 8 * n * n for n in lengths]  # 4 layers, 2 heads of 4
    found = {}
    for balance in ("tokens", "flops"):
        workers = Workers()
        batch = batch_of([n - 1 for n in lengths])
        passes(workers, ActorConfig(micro_batch_size=3, balance=balance), dp=2).score("actor", "score", batch)  # type: ignore[arg-type]
        found[balance] = workers.sent[0][2]["sample_ids"].tolist()
    assert found["tokens"] == plan_batch(lengths, 2, size=3).order
    assert found["flops"] == plan_batch(lengths, 2, size=3, costs=flops).order
    assert (
        found["flops"] != found["tokens"]
        and found["flops"] != plan_batch(lengths, 2, size=3, costs=_with_embedding(lengths)).order
    )


def _with_embedding(lengths: list[int]) -> list[int]:
    return [2 * SHAPE.num_parameters * n + 2 * 4 * 8 * n * n for n in lengths]
