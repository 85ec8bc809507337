"""Do the Megatron chunks compute what transformers computes, in every layout, packed and padded?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import bodies
from tests.distributed.ways import Way
from tests.models import make_batch, transformers_log_probs
from tests.pool import Pool

pytestmark = pytest.mark.distributed

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "pp2_vpp2": {"pp": 2, "vpp": 2},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_pp2_vpp2_sp": {"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True},
    "dp2_pp2": {"dp": 2, "pp": 2},
    "pp2_uneven": {"pp": 2, "layers_per_stage": (3, 1)},
    "pp2_vpp2_ends_alone": {"pp": 2, "vpp": 2, "pipeline_model_parallel_layout": "E|ttt|t|L"},
}
WAYS = {
    "packed": Way(size=2),
    "padded": Way(size=2, packed=False),
    "budget": Way(size=1, tokens=40),
}


def world(layout: dict[str, Any]) -> int:
    return int(layout.get("tp", 1) * layout.get("pp", 1) * layout.get("dp", 1))


def joined(layout: dict[str, Any], results: list[Any], name: str) -> torch.Tensor:
    """The last stage's rows, in the order of the batch."""
    dp, tp, pp = layout.get("dp", 1), layout.get("tp", 1), layout.get("pp", 1)
    found = [results[(pp - 1) * dp * tp + d * tp] for d in range(dp)]
    rows = torch.cat([result[name] for result in found])
    return rows[torch.cat([result["sample_ids"] for result in found]).argsort()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_log_probs_and_entropy_equal_transformers(pool: Pool, llama_folder: Path, layout: str, way: str) -> None:
    batch = make_batch([5, 1, 9, 3, 2], [7, 4, 1, 6, 12])
    want, want_entropy = transformers_log_probs(llama_folder, batch, temperature=0.7)
    results = pool.run(world(LAYOUTS[layout]), bodies.log_probs, llama_folder, LAYOUTS[layout], batch, WAYS[way], 0.7)
    torch.testing.assert_close(joined(LAYOUTS[layout], results, "log_probs"), want, atol=1e-4, rtol=0)
    torch.testing.assert_close(joined(LAYOUTS[layout], results, "entropy"), want_entropy, atol=1e-4, rtol=0)
