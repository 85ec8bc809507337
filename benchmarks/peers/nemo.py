"""How does NeMo-RL pack sequences? Its modified first-fit decreasing, from the one file that holds it."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable

from benchmarks.peers import source_root

FILE = "nemo_rl/data/packing/algorithms.py"


def version() -> str:
    """The file is what is measured; it says no version."""
    return f"{FILE.rpartition('/')[2]} sha256:{hashlib.sha256((source_root('nemo_rl') / FILE).read_bytes()).hexdigest()[:12]}"


def load_packer() -> Callable[[list[int], int], list[list[int]]]:
    """What packs lengths into groups of a budget. The package around the file is not imported: it wants Ray and a GPU stack."""
    path = source_root("nemo_rl") / FILE
    spec = importlib.util.spec_from_file_location("nemo_rl_packing", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ImportError(f"MEGAPPO_PEERS_SRC has no nemo_rl/{FILE}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def pack(lengths: list[int], budget: int) -> list[list[int]]:
        groups: list[list[int]] = module.get_packer("modified_first_fit_decreasing", budget).pack(lengths)
        return groups

    return pack
