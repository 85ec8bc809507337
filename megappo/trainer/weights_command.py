"""How do `megappo weights explain` and `megappo weights verify` run? In one process; explaining needs no torch."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

from megappo.config.check import Plan
from megappo.errors import UserError
from megappo.models.shape import LATEST, checkpoint_folder
from megappo.pp_weights.explain import explain_lines
from megappo.pp_weights.mapping import expected_hf_tensors
from megappo.pp_weights.plan import TransferPlan, Way, build_plan, num_slots, num_writers

_SHOWN = 20  # differing tensors that are listed


def explain(plan: Plan) -> int:
    """Print how the actor's weights would travel. All ranks are taken to be on one host where transport is auto."""
    weights = plan.config.pp_weights
    way: Way = "shared_memory" if weights.transport == "auto" else weights.transport
    transfer = transfer_plan(plan, way)
    for line in explain_lines(transfer, way, num_slots(way, transfer.num_buckets, weights.zero_copy)):
        print(line)  # noqa: T201 - the result of the command
    if weights.mode == "auto":
        print("\npp_weights.mode=auto: shown as full; bucketed where that takes more than a quarter of the free memory")  # noqa: T201
    return 0


def transfer_plan(plan: Plan, way: Way) -> TransferPlan:
    """The plan that the ranks of this config would make."""
    shape, layout, weights = plan.shapes["actor"], plan.layouts["actor"], plan.config.pp_weights
    return build_plan(
        shape,
        layout,
        dict.fromkeys(expected_hf_tensors(shape), plan.config.model.dtype),
        gather=weights.gather,
        num_writers=num_writers(way, layout),
        alignment_bytes=weights.alignment_bytes,
        bucket_bytes=weights.bucket_bytes if weights.mode == "bucketed" else None,
    )


def verify(one: str, other: str) -> int:
    """Compare two models tensor by tensor, bit for bit. Returns 0 where they are equal, 1 where they differ.

    Each is a Hugging Face folder, a checkpoint, or a run folder, which stands for its final weights, or its newest checkpoint."""
    import torch

    from megappo.checkpoint.source import hf_tensors

    differing: list[str] = []
    num_tensors = num_bytes = 0
    sources = [hf_tensors(model_of_source(source)) for source in (one, other)]
    for left, right in zip_longest(*sources):
        if left is None or right is None or left[0] != right[0]:
            names = [pair[0] if pair else "nothing" for pair in (left, right)]
            raise UserError(
                f"{one} and {other} are models of different kinds: {names[0]} meets {names[1]}; compare models of one shape"
            )
        (name, a), (_, b) = left, right
        num_tensors += 1
        num_bytes += a.nbytes
        if a.dtype != b.dtype or a.shape != b.shape:
            differing.append(f"{name}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}".replace("torch.", ""))
        elif not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
            wrong = (a != b).sum().item()
            largest = (a.double() - b.double()).abs().max().item()
            differing.append(f"{name}: {wrong} of {a.numel()} elements differ, by {largest:.3g} at most")
    for line in differing[:_SHOWN]:
        print(line)  # noqa: T201
    if len(differing) > _SHOWN:
        print(f"... and {len(differing) - _SHOWN} more tensors")  # noqa: T201
    verdict = (
        f"{len(differing)} of {num_tensors} tensors differ" if differing else f"equal: {num_tensors} tensors, {num_bytes} bytes"
    )
    print(verdict)  # noqa: T201
    return 1 if differing else 0


def model_of_source(source: str) -> Path:
    """The model path that a source stands for. Raises UserError for a run folder without weights."""
    path = Path(source)
    if checkpoint_folder(path) is not None or not (path / "config.resolved.yaml").is_file():
        return path
    for found in (path / "final", path / "checkpoints" / LATEST):
        if found.exists():
            return found
    raise UserError(f"{source} is a run folder without final/ or checkpoints/latest; let the run end, or set trainer.save_every")
