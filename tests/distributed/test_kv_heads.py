"""Is a model right that has fewer KV heads than tensor-parallel ranks, before and after a PPO update?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import bodies
from tests.distributed.test_parity import world
from tests.distributed.test_update_invariance import HOW, OPTIMIZER, Case, assert_same_update, run
from tests.distributed.ways import Way
from tests.models import PLAIN_ADAM, make_batch, make_model_folder, transformers_log_probs, transformers_update
from tests.pool import Pool

pytestmark = pytest.mark.distributed

BATCH = make_batch([5, 1, 9, 3], [7, 14, 1, 12])
TP2, TP4, TP4_SP = {"tp": 2, "pp": 2}, {"tp": 4}, {"tp": 4, "sequence_parallel": True}
MODELS: dict[tuple[str, int], list[dict[str, Any]]] = {
    ("llama", 1): [TP2, TP4],
    ("llama", 2): [TP4_SP],
    ("qwen2", 1): [TP2, TP4_SP],
    ("qwen2", 2): [TP4],
    ("qwen3", 1): [TP2, TP4],
    ("qwen3", 2): [TP4_SP],
}
Make = Callable[[str, int], Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """(family, KV heads) -> a folder of a model with 4 query heads; Qwen2 has biases, Qwen3 norms on its heads."""
    base, made = tmp_path_factory.mktemp("kv"), {}

    def folder(family: str, kv_heads: int) -> Path:
        if (family, kv_heads) not in made:
            made[family, kv_heads] = make_model_folder(base / f"{family}{kv_heads}", family, num_key_value_heads=kv_heads)
        return made[family, kv_heads]

    return folder


LONG = [("qwen2", 1), ("qwen3", 2), ("llama", 2)]


@pytest.mark.parametrize(
    "family, kv_heads", [pytest.param(*model, marks=pytest.mark.long if model in LONG else ()) for model in MODELS]
)
def test_log_probs_and_entropy_equal_transformers_before_and_after_an_update(
    pool: Pool, make: Make, family: str, kv_heads: int
) -> None:
    folder = make(family, kv_heads)
    before = transformers_log_probs(folder, BATCH)
    model, want_norm = transformers_update(folder, BATCH, PLAIN_ADAM)
    after = transformers_log_probs(folder, BATCH, model=model)
    for layout in MODELS[family, kv_heads]:
        way = Way(size=2, packed=layout != TP4)
        results = pool.run(world(layout), bodies.log_probs_around_an_update, folder, layout, BATCH, way, PLAIN_ADAM)
        got_before, metrics, got_after = results[-1]
        assert metrics["grad_norm"] == pytest.approx(want_norm, rel=1e-4), layout
        for got, want, when in ((got_before, before, "before"), (got_after, after, "after")):
            for name, expected in zip(("log_probs", "entropy"), want, strict=True):
                assert (got[name] - expected).abs().max().item() <= 1e-4, (layout, when, name)


@pytest.mark.parametrize(
    "family, kv_heads, layout", [("llama", 1, TP2), ("qwen2", 1, TP4), pytest.param("qwen3", 2, TP4, marks=pytest.mark.long)]
)
def test_one_update_equals_the_one_process_update(
    pool: Pool, make: Make, family: str, kv_heads: int, layout: dict[str, Any]
) -> None:
    folder = make(family, kv_heads)
    optimizer = replace(OPTIMIZER, eps=1e-6)  # Qwen3's norms make some gradients so small that 1e-7 would show their rounding
    alone: Case = ({}, None, HOW, optimizer)
    assert_same_update(run(pool, folder, (layout, None, HOW, optimizer)), run(pool, folder, alone))
