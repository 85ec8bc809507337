"""Does a real pretrained model come out right? SmolLM2-135M-Instruct against transformers; needs `make smollm2-model`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import bodies
from tests.distributed.test_parity import world
from tests.distributed.ways import Way
from tests.models import make_batch, transformers_log_probs
from tests.pool import Pool

FOLDER = Path(__file__).resolve().parents[2] / ".cache" / "smollm2-135m"

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not (FOLDER / "stamp").exists(), reason="run `make smollm2-model` first (0.5 GB)"),
]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layout", [{}, {"tp": 3}, {"pp": 2, "vpp": 3}], ids=["one", "tp3", "pp2_vpp3"])
def test_log_probs_of_smollm2_equal_transformers(pool: Pool, layout: dict[str, Any], packed: bool) -> None:
    batch = make_batch([30, 12, 41], [9, 16, 5], vocab_size=49152)
    want, want_entropy = transformers_log_probs(FOLDER, batch)
    found = pool.run(world(layout), bodies.log_probs, FOLDER, layout, batch, Way(size=2, packed=packed))[-1]
    torch.testing.assert_close(found["log_probs"], want, atol=1e-3, rtol=0)
    torch.testing.assert_close(found["entropy"], want_entropy, atol=1e-3, rtol=0)
