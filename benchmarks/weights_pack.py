"""What does it cost to lay 10,000 small tensors side by side? Ours beside one memcpy of as many bytes, and beside others' ways.

python -m benchmarks.weights_pack FILE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.timing import contest
from megappo.pp_weights.buffer import build_memory_buffer, build_memory_reference, weight_buffer_meta
from megappo.pp_weights.copying import Copies

NUM_TENSORS, TENSOR_BYTES, ROUNDS = 10_000, 16 << 10, 21


def measure() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    size = TENSOR_BYTES // 2
    tensors = {
        f"layers.{index}.weight": torch.randint(-(2**15), 2**15, (size,), dtype=torch.int16, generator=generator)
        for index in range(NUM_TENSORS)
    }
    meta = weight_buffer_meta(tensors)
    buffer = build_memory_buffer(meta)
    places, sources = list(build_memory_reference(meta, buffer).values()), list(tensors.values())
    copies = Copies(zip(places, sources, strict=True))
    copies.run()
    assert all(torch.equal(place, source) for place, source in zip(places, sources, strict=True)), "packed tensors are wrong"
    # Tensors that live in the buffer already: the same bytes on both sides.
    resident = Copies(zip(places, build_memory_reference(meta, buffer).values(), strict=True))

    packed = torch.cat(sources)
    assert torch.equal(packed.view(torch.uint8), buffer.data), "they do not lie side by side in order"
    block = torch.ones_like(packed)
    contestants: dict[str, Callable[[], object]] = {
        "ours": copies.run,
        "memcpy": lambda: np.copyto(block.numpy(), packed.numpy()),  # libc's: faster on one block than torch's copy
        "torch.copy_": lambda: block.copy_(packed),
        "torch.cat": lambda: torch.cat(sources, out=block),
    }
    try:
        from vllm.distributed.weight_transfer.packed_tensor import pack_tensors
    except ImportError as error:
        print(f"peer vllm: skipped (not installed): {error}")
    else:
        assert torch.equal(pack_tensors(iter(tensors.items()), itemgetter(1), packed.nbytes).packed_tensor, buffer.data)
        contestants["vllm"] = lambda: pack_tensors(iter(tensors.items()), itemgetter(1), packed.nbytes)
    seconds = contest(contestants, ROUNDS)
    return {"bytes": packed.nbytes, "resident_bytes": resident.copied_bytes, "seconds": seconds}


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps(measure()))
