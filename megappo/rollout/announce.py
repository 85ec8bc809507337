"""Does the model that an update announces fit the one that the engine runs? Asked before the first tensor is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from megappo.errors import RunFailed
from megappo.pp_weights.manifest import fingerprint_of
from megappo.pp_weights.update import Update
from megappo.pp_weights.verify import NamesDiffer, compare_names

FLOATS = ("float32", "bfloat16", "float16", "float64")


def check_announcement(update: Update, expected: Mapping[str, tuple[int, ...]], engine: str) -> None:
    """Raise NamesDiffer, with every fault, unless names and full shapes are those of the engine's model (`expected`) and the
    tensors are plain numbers; RunFailed where the announcement contradicts itself."""
    what = f"weights version {update.version} for {engine}"
    quantised = [
        f"{name} {dtype}, expected one of {', '.join(FLOATS)}" for name, (dtype, _) in update.table.items() if dtype not in FLOATS
    ]
    try:
        compare_names(expected, update.shapes, what)
    except NamesDiffer as error:
        raise NamesDiffer(what, error.missing, error.unexpected, error.misshapen + quantised) from None
    if quantised:
        raise NamesDiffer(what, [], [], quantised)
    if fingerprint_of(update.table) != update.fingerprint:
        raise RunFailed(f"{what}: the announced names, dtypes and shapes do not have the fingerprint {update.fingerprint!r}")
