"""How many collectives does a hand-over make, of which kind, and how many bytes does each rank take in? `counted()`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

OBJECT = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)
# How many bytes each takes in from others, from its arguments.
TENSOR: dict[str, Callable[..., int]] = {
    "broadcast": lambda tensor, src=None, group=None, async_op=False, group_src=None: (
        0 if _is_source(src, group, group_src) else tensor.nbytes
    ),
    "all_gather": lambda tensor_list, tensor, group=None, async_op=False: sum(t.nbytes for t in tensor_list) - tensor.nbytes,
    "all_gather_into_tensor": lambda output_tensor, input_tensor, *rest, **options: output_tensor.nbytes - input_tensor.nbytes,
    "gather": lambda tensor, gather_list=None, *rest, **options: sum(t.nbytes for t in gather_list or ()),
    "recv": lambda tensor, *rest, **options: tensor.nbytes,
    "irecv": lambda tensor, *rest, **options: tensor.nbytes,
    "send": lambda *rest, **options: 0,
    "isend": lambda *rest, **options: 0,
    "all_reduce": lambda tensor, *rest, **options: tensor.nbytes,
    "reduce": lambda tensor, *rest, **options: tensor.nbytes,
    "barrier": lambda *rest, **options: 0,
    "reduce_scatter": lambda output, *rest, **options: output.nbytes,
    "reduce_scatter_tensor": lambda output, *rest, **options: output.nbytes,
    "scatter": lambda tensor, *rest, **options: tensor.nbytes,
    "all_to_all": lambda outputs, *rest, **options: sum(t.nbytes for t in outputs),
    "all_to_all_single": lambda output, *rest, **options: output.nbytes,
    "batch_isend_irecv": lambda ops: 0,
}


@dataclass
class Counts:
    """What one rank did."""

    object_collectives: int = 0
    tensor_collectives: int = 0
    received_bytes: int = 0


@contextlib.contextmanager
def counted() -> Iterator[Counts]:
    """Count this rank's calls of torch.distributed inside the block. The tensor collectives that an object collective is made of
    count as well."""
    counts = Counts()

    def watch(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if name in OBJECT:
                counts.object_collectives += 1
            else:
                counts.tensor_collectives += 1
                counts.received_bytes += TENSOR[name](*args, **kwargs)
            return function(*args, **kwargs)

        return call

    before = {name: getattr(c10d, name) for name in (*OBJECT, *TENSOR) if hasattr(c10d, name)}
    namespaces: tuple[Any, ...] = (c10d, dist)
    for name, function in before.items():
        for namespace in namespaces:
            setattr(namespace, name, watch(name, function))
    try:
        yield counts
    finally:
        for name, function in before.items():
            for namespace in namespaces:
                setattr(namespace, name, function)


def most(value: float) -> float:
    """The largest of all ranks' values. Called by all ranks."""
    box = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box)


def _is_source(src: int | None, group: Any, group_src: int | None) -> bool:
    if group_src is not None:
        return dist.get_rank(group) == group_src
    return dist.get_rank() == src
