"""How does every benchmark report? A table on the terminal and `benchmarks/results/NAME.json`, from one list of rows."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One measurement. ratio: how many times better ours is than the peer's, above 1 is better; of a row that `over` made, ours
    by the bound in `peer`, less is better. goal: in words; met: whether."""

    what: str
    ours: float
    peer: float | None
    unit: str
    ratio: float | None
    goal: str | None
    met: bool | None


def row(
    what: str,
    ours: float,
    unit: str,
    peer: float | None = None,
    better: Literal["lower", "higher"] = "lower",
    at_most: float | None = None,
    at_least: float | None = None,
    min_ratio: float | None = None,
) -> Row:
    """A row whose ratio and verdict follow from the numbers. Goals: `ours` at most or at least a value, the ratio to the peer."""
    ratio = None
    if peer is not None and ours and peer:
        ratio = peer / ours if better == "lower" else ours / peer
    goals: list[tuple[str, bool]] = []
    if at_most is not None:
        goals.append((f"<= {at_most:g} {unit}", ours <= at_most))
    if at_least is not None:
        goals.append((f">= {at_least:g} {unit}", ours >= at_least))
    if min_ratio is not None:
        goals.append((f"ratio >= {min_ratio:g}", ratio is not None and ratio >= min_ratio))
    goal = " and ".join(text for text, _ in goals) or None
    return Row(what, ours, peer, unit, ratio, goal, all(met for _, met in goals) if goals else None)


def beside(what: str, seconds: Mapping[str, float], rival: str, min_ratio: float | None = None) -> Row:
    """A row in ms from the seconds of "ours" and "peer". Without the latter `rival` was not there: no verdict, and it says so."""
    if "peer" in seconds or min_ratio is None:
        return row(what, seconds["ours"] * 1e3, "ms", seconds["peer"] * 1e3 if "peer" in seconds else None, min_ratio=min_ratio)
    return unjudged(what, seconds["ours"] * 1e3, "ms", f"ratio >= {min_ratio:g}", rival)


def unjudged(what: str, ours: float, unit: str, goal: str, absent: str) -> Row:
    """A row whose goal is about a peer that is not there: neither met nor missed."""
    return Row(what, ours, None, unit, None, f"{goal} (no {absent} here)", None)


def over(what: str, ours: float, unit: str, bound: float, at_most: float | None = None) -> Row:
    """A row whose ratio is ours by a bound: a formula, a limit, what the machine itself can do. Less is better."""
    ratio = ours / bound if bound else None
    goal = None if at_most is None else f"ratio <= {at_most:g}"
    return Row(what, ours, bound, unit, ratio, goal, None if at_most is None else ratio is not None and ratio <= at_most)


def report(name: str, rows: list[Row], packages: tuple[str, ...] = ("torch",), versions: Mapping[str, str] | None = None) -> Path:
    """Print the table and write the JSON file; returns its path. versions: of what is no package of this environment."""
    result = {
        "name": name,
        "rows": [asdict(r) for r in rows],
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in ("megappo", *packages)},
            **(versions or {}),
        },
        "machine": machine(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows))
    return path


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    cells = [["what", "ours", "peer", "unit", "ratio", "goal", "met"]]
    for r in rows:
        verdict = {None: "", True: "yes", False: "NO"}[r.met]
        cells.append([r.what, _number(r.ours), _number(r.peer), r.unit, _number(r.ratio), r.goal or "", verdict])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def machine() -> dict[str, str | int | float]:
    """What the numbers depend on: processor, cores, how busy they were."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0
    return {
        "processor": model,
        "cores": cores,
        "system": f"{platform.system()} {platform.release()}",
        "load_1min": os.getloadavg()[0],
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
