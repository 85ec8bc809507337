"""Do the algorithms learn? Runs configs/demo_cpu.yaml with each of them and writes docs/learning_curves.{md,svg}.

`make learning-curves`: some 15 minutes on two CPU cores. The sampled responses of a step are as many in every run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megappo.observe.metrics import read_metrics

CONFIG = "configs/demo_cpu.yaml"
GROUPS = ("rollout.n=8", "trainer.batch_size=16")
RUNS: dict[str, tuple[str, ...]] = {
    "PPO": (),
    "GRPO": ("algorithm.advantages=grpo", *GROUPS),
    "RLOO": ("algorithm.advantages=rloo", *GROUPS),
    "REINFORCE++": ("algorithm.advantages=reinforce_plus_plus",),
}
COLOURS = ("#1b6ca8", "#c8553d", "#3c8d5a", "#7a4fa3")
WIDTH, HEIGHT, LEFT, TOP = 640, 320, 50, 20
SMOOTH = 10
DOCS = Path("docs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    curves: dict[str, list[float]] = {}
    ends: dict[str, list[str]] = {}
    for name, overrides in RUNS.items():
        run = f"learning_{name.lower().replace('+', 'p')}"
        command = ["megappo", "train", CONFIG, f"run.name={run}", f"trainer.steps={steps}", *overrides]
        print(" ".join(command), flush=True)
        done = subprocess.run(
            [str(Path(sys.executable).with_name(command[0])), *command[1:]], stdout=subprocess.PIPE, text=True, check=True
        )
        ends[name] = done.stdout.strip().splitlines()[-2:]
        print("\n".join(ends[name]), flush=True)
        curves[name] = [row["reward/mean"] for row in read_metrics(Path("runs") / run / "metrics.jsonl")]
    (DOCS / "learning_curves.svg").write_text(picture(curves), encoding="utf-8")
    (DOCS / "learning_curves.md").write_text(page(curves, ends, steps), encoding="utf-8")


def smoothed(values: Sequence[float]) -> list[float]:
    """Mean of each value and up to SMOOTH - 1 before it."""
    return [sum(values[max(0, i - SMOOTH + 1) : i + 1]) / (i + 1 - max(0, i - SMOOTH + 1)) for i in range(len(values))]


def picture(curves: Mapping[str, Sequence[float]]) -> str:
    """Mean reward over steps, as an SVG."""
    steps = max(map(len, curves.values()))

    def x(step: float) -> float:
        return LEFT + step / max(steps, 1) * (WIDTH - LEFT - 120)

    def y(reward: float) -> float:
        return TOP + (1 - reward) * (HEIGHT - TOP - 40)

    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">']
    for i in range(6):
        reward, step = i / 5, steps * i // 5
        lines.append(f'<path d="M{LEFT} {y(reward):.1f}H{x(steps):.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y(reward) + 4:.1f}" text-anchor="end">{reward:.1f}</text>')
        lines.append(f'<text x="{x(step):.1f}" y="{HEIGHT - 22}" text-anchor="middle">{step}</text>')
    lines.append(f'<text x="{x(steps / 2):.1f}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    for number, (name, values) in enumerate(curves.items()):
        points = " ".join(f"{x(i + 1):.1f},{y(value):.1f}" for i, value in enumerate(smoothed(values)))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[number]}" stroke-width="1.5"/>')
        place = f'x="{x(steps) + 10:.1f}" y="{TOP + 20 + 18 * number}"'
        lines.append(f'<text {place} fill="{COLOURS[number]}">{name}</text>')
    return "\n".join([*lines, "</svg>\n"])


def page(curves: Mapping[str, Sequence[float]], ends: Mapping[str, Sequence[str]], steps: int) -> str:
    marks = list(range(steps // 10, steps + 1, steps // 10)) if steps >= 10 else [steps]
    lines = [
        "# Learning curves",
        "",
        f"Written by `make learning-curves`: {CONFIG} (pp2 x vpp2, real vLLM, sums) with four algorithms, {steps} steps",
        f"of 128 responses each. Mean reward of the samples, over the last {SMOOTH} steps:",
        "",
        "![mean reward over steps](learning_curves.svg)",
        "",
        "| algorithm | " + " | ".join(map(str, marks)) + " |",
        "|---|" + "---|" * len(marks),
    ]
    for name, values in curves.items():
        lines.append(f"| {name} | " + " | ".join(f"{smoothed(values)[mark - 1]:.2f}" for mark in marks) + " |")
    lines += ["", "The last lines of each run, and what it was started with on top of the config:", ""]
    for name, end in ends.items():
        options = " ".join(RUNS[name])
        lines.append(f"- {name}{f' (`{options}`)' if options else ''}: `{'`, `'.join(end)}`")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
