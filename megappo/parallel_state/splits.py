"""How many layers does each (stage, chunk) hold? `layer_counts`, for every way in which Megatron splits a decoder. No torch.

The keys have Megatron's names and its meaning (megatron/core/transformer/transformer_block.py and
pipeline_parallel_layer_layout.py); `layers_per_stage` is ours. At most one way may be chosen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megappo.errors import UserError

Counts = tuple[tuple[int, ...], ...]
"""[stage][chunk] -> number of layers"""


@dataclass(frozen=True)
class PipelineSplit:
    """A way of dealing num_layers out to pp stages of vpp chunks each. All of these at their defaults: even.

    layers_per_stage: layers of each stage, cut evenly into its chunks.
    num_layers_in_first/last_pipeline_stage: layers of that stage; the others share the rest evenly.
    account_for_embedding/loss_in_pipeline_split: the embedding / the loss counts as one layer of an even split.
    pipeline_model_parallel_layout: chunk-major, `|` between chunks, E embedding, t layer, L loss, x*n and (..)*n for repeats.
    """

    num_layers: int
    pp: int
    vpp: int
    key: str  # the config section that error messages name
    layers_per_stage: tuple[int, ...] | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    pipeline_model_parallel_layout: str | None = None

    def given(self, *names: str) -> str:
        """`section.key=value` of the keys that are set, joined by "and"."""
        found = {name: getattr(self, name) for name in names}
        return " and ".join(
            f"{self.key}.{name}={_written(value)}" for name, value in found.items() if value is not None and value is not False
        )


def layer_counts(split: PipelineSplit) -> Counts:
    """Layers of each [stage][chunk]. Raises UserError for two ways at once, and for numbers that do not fit."""
    chosen = [(keys, way) for keys, way in _WAYS if split.given(*keys)]
    if len(chosen) > 1:
        both = split.given(*(name for keys, _ in chosen for name in keys))
        raise UserError(f"{both} are {len(chosen)} ways of splitting the same layers; keep one of them")
    return chosen[0][1](split) if chosen else _even(split)


def _even(split: PipelineSplit) -> Counts:
    key, pp, vpp, num_layers = split.key, split.pp, split.vpp, split.num_layers
    if num_layers % pp:
        fits = [p for p in range(1, num_layers + 1) if num_layers % p == 0]
        raise UserError(
            f"{key}.pp={pp} does not divide num_layers={num_layers}; use {one_of(fits)}, or give {key}.layers_per_stage"
        )
    per_stage = num_layers // pp
    if per_stage % vpp:
        fits = [v for v in range(1, per_stage + 1) if per_stage % v == 0]
        raise UserError(
            f"{key}.vpp={vpp} does not divide the {per_stage} layers of each stage (num_layers={num_layers}, pp={pp}); "
            f"use {one_of(fits)}"
        )
    return ((per_stage // vpp,) * vpp,) * pp


def _per_stage(split: PipelineSplit) -> Counts:
    stages = split.layers_per_stage or ()
    given = f"{split.key}.layers_per_stage={list(stages)}"
    if len(stages) != split.pp:
        raise UserError(f"{given} has {len(stages)} entries; {split.key}.pp={split.pp} needs {split.pp}")
    if sum(stages) != split.num_layers or min(stages) < 1:
        raise UserError(
            f"{given} must hold positive counts that sum to num_layers={split.num_layers} (they sum to {sum(stages)})"
        )
    for stage, count in enumerate(stages):
        if count % split.vpp:
            below = count // split.vpp * split.vpp
            raise UserError(
                f"{split.key}.layers_per_stage[{stage}]={count} is not a multiple of {split.key}.vpp={split.vpp}; "
                f"use {one_of([value for value in (below, below + split.vpp) if value])}"
            )
    return tuple((count // split.vpp,) * split.vpp for count in stages)


def _first_and_last(split: PipelineSplit) -> Counts:
    first, last = split.num_layers_in_first_pipeline_stage, split.num_layers_in_last_pipeline_stage
    given = split.given(*_PINNED)
    if split.pp == 1:
        raise UserError(f"{given} needs pipeline stages: with {split.key}.pp=1 leave it out, or raise pp to 2 or more")
    stages = _pinned(split, first, last)
    if stages is not None:
        return tuple((count // split.vpp,) * split.vpp for count in stages)
    every = range(1, split.num_layers)
    mends = []
    if first is not None and (fits := [value for value in every if _pinned(split, value, last)]):
        mends.append(f"{_PINNED[0]}={one_of(fits)}")
    if last is not None and (fits := [value for value in every if _pinned(split, first, value)]):
        mends.append(f"{_PINNED[1]}={one_of(fits)}")
    raise UserError(
        f"{given}: num_layers={split.num_layers} on {split.key}.pp={split.pp}, vpp={split.vpp} does not come out even (the other "
        f"stages share the rest, each stage needs a multiple of vpp); use {', or '.join(mends or ['layers_per_stage'])}"
    )


def _pinned(split: PipelineSplit, first: int | None, last: int | None) -> list[int] | None:
    """Layers of each stage where the first and/or the last are given; None where that does not come out even."""
    head, tail = [[] if count is None else [count] for count in (first, last)]
    others, rest = split.pp - len(head) - len(tail), split.num_layers - sum(head) - sum(tail)
    if (rest % others if others else rest) or (others and rest < others):
        return None
    stages = [*head, *([rest // others] * others if others else []), *tail]
    return stages if all(count > 0 and count % split.vpp == 0 for count in stages) else None


def _accounted(split: PipelineSplit) -> Counts:
    embedding, loss = split.account_for_embedding_in_pipeline_split, split.account_for_loss_in_pipeline_split
    units, pieces = split.num_layers + embedding + loss, split.pp * split.vpp
    if units % pieces:
        what = " and ".join(["the embedding"] * embedding + ["the loss"] * loss)
        fits = [p for p in range(1 if split.vpp == 1 else 2, units + 1) if units % (p * split.vpp) == 0]
        mend = f"use {one_of(fits)} stages, or " if fits else ""
        raise UserError(
            f"{split.given(*_ACCOUNTED)}: num_layers={split.num_layers} and {what} are {units}, which {split.key}.pp={split.pp} "
            f"x vpp={split.vpp} does not divide; {mend}give {split.key}.pipeline_model_parallel_layout"
        )
    counts = [[units // pieces] * split.vpp for _ in range(split.pp)]
    counts[0][0] -= embedding
    counts[-1][-1] -= loss
    return tuple(map(tuple, counts))


def _written_out(split: PipelineSplit) -> Counts:
    text = split.pipeline_model_parallel_layout or ""
    given = f"{split.key}.pipeline_model_parallel_layout={text!r}"
    rows = expand_layout(text)
    written = "".join(rows)
    if "m" in written:
        raise UserError(f"{given} has m (multi-token prediction), which is not supported; leave it out")
    if unknown := sorted(set(written) - set("EtL")):
        raise UserError(f"{given} has {unknown[0]!r}; use E, t and L, | between chunks, and x*n or (..)*n for repeats")
    pieces = split.pp * split.vpp
    if len(rows) != pieces:
        fits = f"set vpp={len(rows) // split.pp}" if split.pp > 1 and len(rows) % split.pp == 0 else f"write {pieces}"
        raise UserError(f"{given} has {len(rows)} chunks; {split.key}.pp={split.pp} x vpp={split.vpp} needs {pieces}: {fits}")
    if not (rows[0].startswith("E") and rows[-1].endswith("L") and written.count("E") == written.count("L") == 1):
        raise UserError(f"{given} must begin with the only E and end with the only L, as in 'Et|tL'")
    if written.count("t") != split.num_layers:
        raise UserError(f"{given} has {written.count('t')} layers (t); the model has num_layers={split.num_layers}")
    return tuple(tuple(rows[chunk * split.pp + stage].count("t") for chunk in range(split.vpp)) for stage in range(split.pp))


def expand_layout(text: str) -> list[str]:
    """Megatron's grammar: commas mean nothing, (..)*n is unrolled first, then x*n, then `|` separates the chunks.

    "Et*2|(t|)*2L" -> ["Ett", "t", "t", "L"]"""
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return text.split("|")


_PINNED = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_WAYS: tuple[tuple[tuple[str, ...], Callable[[PipelineSplit], Counts]], ...] = (
    (("layers_per_stage",), _per_stage),
    (_PINNED, _first_and_last),
    (_ACCOUNTED, _accounted),
    (("pipeline_model_parallel_layout",), _written_out),
)
"""The keys that choose a way, and the way."""


def one_of(values: Sequence[int]) -> str:
    """ "1, 2 or 4", shortened where there are many."""
    shown = [*values[:7], values[-1]] if len(values) > 8 else list(values)
    return ", ".join(map(str, shown[:-1])) + (" or " if len(shown) > 1 else "") + str(shown[-1])


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return str(list(value))
    return str(value).lower() if isinstance(value, bool) else repr(value)
