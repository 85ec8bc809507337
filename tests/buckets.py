"""How do tests hand weights over in pieces? `send`: tiny buckets in two slots, each filled with garbage once it may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from megappo.pp_weights.buffer import WeightBuffer, views_of
from megappo.pp_weights.manifest import Manifest, build_manifest, dtype_name, fingerprint_of, natural_order
from megappo.pp_weights.update import Bucket, Receiver, Update
from megappo.pp_weights.verify import checksums

Tensors = Mapping[str, torch.Tensor]
Content = list[tuple[str, tuple[int, int] | None]]  # names of a bucket, each with its rows where it comes in parts
GARBAGE = 0xAB


def cut(tensors: Tensors, bucket_bytes: int) -> list[Content]:
    """What each bucket holds. A tensor larger than a bucket comes in parts, each in a bucket of its own."""
    buckets: list[Content] = []
    room = 0
    for name in sorted(tensors, key=natural_order):
        tensor = tensors[name]
        if tensor.nbytes > bucket_bytes:
            step = max(bucket_bytes // tensor[:1].nbytes, 1)
            ends = range(0, tensor.shape[0], step)
            buckets += [[(name, (start, min(start + step, tensor.shape[0])))] for start in ends]
            room = 0
            continue
        if tensor.nbytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append((name, None))
        room -= -(-tensor.nbytes // 16) * 16
    return buckets


def send(
    receiver: Receiver,
    tensors: Tensors,
    version: int,
    *,
    bucket_bytes: int,
    shards: Sequence[Tensors] | None = None,
    verify: bool = True,
    edit: Callable[[list[Content]], list[Content]] = lambda buckets: buckets,
    announce: Callable[[Update], Update] = lambda update: update,
    stamp: int | None = None,
) -> int:
    """Send `tensors` as `version`; returns the number of buckets. shards: what each worker gets of them.

    edit, announce, stamp: ways to break it: other buckets, another announcement, another version in the manifests."""
    workers = shards or [tensors]
    buckets = edit(cut(workers[0], bucket_bytes))
    table = {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
    update = announce(Update(version, table, fingerprint_of(table), len(buckets), shards=len(workers), verify=verify))
    slots = [[WeightBuffer.create(Manifest((), 2 * bucket_bytes)) for _ in workers] for _ in range(2)]
    receiver.start(update)
    for index, content in enumerate(buckets):
        manifests = [
            fill(slot, own, content, version if stamp is None else stamp)
            for slot, own in zip(slots[index % 2], workers, strict=True)
        ]
        receiver.settle()
        for slot in slots[(index + 1) % 2]:
            slot.data.fill_(GARBAGE)
        receiver.load(Bucket(index, tuple(slot.path for slot in slots[index % 2]), tuple(manifests)))
    receiver.settle()
    for slot in (slot for pair in slots for slot in pair):
        slot.data.fill_(GARBAGE)
        slot.close()
    receiver.finish()
    return len(buckets)


def fill(slot: WeightBuffer, tensors: Tensors, content: Content, version: int) -> Manifest:
    rows = {name: part for name, part in content if part is not None}
    meta: dict[str, Any] = {name: (tuple(tensors[name].shape), tensors[name].dtype) for name, _ in content}
    manifest = build_manifest(meta, rows=rows, order=[name for name, _ in content])
    views = views_of(slot.data[: manifest.total_bytes], manifest)
    for name, part in content:
        views[name].copy_(tensors[name] if part is None else tensors[name][part[0] : part[1]])
    return manifest.stamped(version, checksums(views))


def worker_shard(tensors: Tensors, worker: int, tp: int) -> dict[str, torch.Tensor]:
    """What one of `tp` workers holds: rows of q, k, v, gate, up; columns of o and down, their biases whole; 32 n rows of the
    vocabulary."""
    own = {}
    for name, tensor in tensors.items():
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            own[name] = tensor.chunk(tp, 0)[worker]
        elif kind in ("o_proj", "down_proj") and tensor.dim() == 2:
            own[name] = tensor.chunk(tp, 1)[worker]
        elif kind in ("embed_tokens", "lm_head"):
            rows = -(-tensor.shape[0] // (32 * tp)) * 32
            own[name] = tensor[worker * rows : (worker + 1) * rows]
        else:
            own[name] = tensor
    return own


def in_models_order(names: Iterable[str]) -> list[str]:
    """q before k before v, gate before up."""
    places = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "gate_proj": 0, "up_proj": 1}

    def key(name: str) -> tuple[list[str | int], int]:
        parent, kind, leaf = name.rsplit(".", 2) if name.count(".") > 1 else ("", *name.rsplit(".", 1))
        return [*natural_order(parent), leaf if kind in places else kind], places.get(kind, 0)

    return sorted(names, key=key)
