"""Is the hand-over of weights as fast, as lean and as quiet as it should be? `make bench-weights`; docs/benchmarks.md.

    [MEGAPPO_PEERS_PY=python] [MEGAPPO_PEERS_SRC=folder] python -m benchmarks.weights

Each part runs in processes of its own, those with peers under MEGAPPO_PEERS_PY. Both sides of a row are measured in one run.
"""

from __future__ import annotations

from benchmarks.parts import Found, peers_python, run
from benchmarks.report import Row, beside, over, report, row

MB = 1e6


def counted_rows(counts: Found) -> list[Row]:
    """No clock in these: what torch.distributed was asked for in one steady sync, the worst of all transports and modes."""
    ours = {name: case for name, case in counts.items() if name not in ("verl", "peers")}
    objects = max(case["object_collectives"] for case in ours.values())
    collectives = max(case["tensor_collectives"] / case["stage_buckets"] for case in ours.values())
    worst = max(ours.values(), key=lambda case: case["counted_bytes"] / case["formula_bytes"])
    verl = counts.get("verl", {}).get("object_collectives")
    assert verl is None or verl > 0, "the counter does not see object collectives"
    return [
        row("object_collectives", objects, "calls", verl, at_most=0),
        row("collectives_per_stage_bucket", collectives, "calls", at_most=2),
        over("bytes_over_formula", worst["counted_bytes"], "bytes", worst["formula_bytes"], at_most=1.001),
    ]


def handover_rows(size: str, found: Found, goals: dict[str, float | None]) -> list[Row]:
    return [
        beside(f"handover_{size}_vs_{rival}", found["seconds"][rival], rival, min_ratio=goal) for rival, goal in goals.items()
    ]


def pack_rows(found: Found) -> list[Row]:
    seconds = {name: value * 1e3 for name, value in found["seconds"].items()}
    return [
        row("pack_vs_memcpy", seconds["ours"], "ms", seconds["memcpy"], min_ratio=0.85),
        row("pack_resident_bytes", found["resident_bytes"], "bytes", at_most=0),
        row("pack_vs_torch_copy", seconds["ours"], "ms", seconds["torch.copy_"]),
        row("pack_vs_torch_cat", seconds["ours"], "ms", seconds["torch.cat"]),
        *(row("pack_vs_vllm_packed", seconds["ours"], "ms", seconds[name]) for name in ("vllm",) if name in seconds),
    ]


def memory_rows(found: Found) -> list[Row]:
    worst = max(found.values(), key=lambda case: case["extra_bytes"] / case["bound_bytes"])
    return [over("extra_memory_over_bound", worst["extra_bytes"] / MB, "MB", worst["bound_bytes"] / MB, at_most=1)]


def main() -> None:
    python = peers_python()
    counts, small, large, pp = (run("weights_handover", part, python=python) for part in ("counts", "small", "large", "pp"))
    assert small["tensors"] >= 200 and small["bytes"] <= 64 * MB, "small: 200 tensors or more in 64 MB or less"
    assert large["bytes"] >= 300 * MB, "large: 300 MB or more"
    rows = [
        *counted_rows(counts),
        *handover_rows("small", small, {"verl": 60, "slime": 20, "memcpy": None}),
        *handover_rows("large", large, {"verl": 12, "slime": 6, "memcpy": 0.6}),
        *handover_rows("pp", pp, {"verl01": 1.5}),
        *pack_rows(run("weights_pack")),
        *memory_rows(run("weights_memory")),
    ]
    versions = {**small["peers"], **pp["peers"]}
    report("weights", rows, packages=("torch", "megatron-core", "numpy", "numba"), versions=versions)


if __name__ == "__main__":
    main()
