"""Are the algorithms and the batches as fast and as lean as they should be? `make bench-algorithms`; docs/benchmarks.md.

    [MEGAPPO_PEERS_PY=python] [MEGAPPO_PEERS_SRC=folder] python -m benchmarks.algorithms

Each part runs in a process of its own under MEGAPPO_PEERS_PY. Both sides of a row are measured in one run.
"""

from __future__ import annotations

from benchmarks import algorithms_batches, algorithms_gae, algorithms_heads, algorithms_workers
from benchmarks.parts import peers_python, run
from benchmarks.report import Row, report

PARTS = {
    "algorithms_gae": algorithms_gae,
    "algorithms_batches": algorithms_batches,
    "algorithms_heads": algorithms_heads,
    "algorithms_workers": algorithms_workers,
}


def main() -> None:
    rows: list[Row] = []
    versions: dict[str, str] = {}
    for name, part in PARTS.items():
        found = run(name, python=peers_python())
        rows += part.rows(found)
        versions |= found["peers"]
    report("algorithms", rows, packages=("torch", "numpy", "numba", "megatron-core", "tensordict"), versions=versions)


if __name__ == "__main__":
    main()
