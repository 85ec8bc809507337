"""Does the counter of collectives see them all? Against calls made on purpose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.counting import counted
from tests.pool import Pool

pytestmark = pytest.mark.distributed


def calls() -> list[Any]:
    rank = dist.get_rank()
    tensor = torch.zeros(10)
    with counted() as plain:
        dist.broadcast(tensor, src=0)
        dist.all_gather([torch.empty(10), torch.empty(10)], tensor)
        dist.broadcast(tensor, group=dist.group.WORLD, group_src=1, async_op=True).wait()
    with counted() as objects:
        dist.all_gather_object([None, None], {"rank": rank})
        dist.broadcast_object_list([rank], src=0)
    dist.all_reduce(tensor)
    return [vars(plain), objects.object_collectives, objects.tensor_collectives > 0]


def test_collectives_objects_and_received_bytes_are_counted_inside_the_block_alone(pool: Pool) -> None:
    # 40 bytes from the other's broadcast, 40 of the gathered 80 are another's
    plain = {"object_collectives": 0, "tensor_collectives": 3, "received_bytes": 80}
    assert pool.run(2, calls) == [[plain, 2, True]] * 2
