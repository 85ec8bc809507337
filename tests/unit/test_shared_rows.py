"""What ranks map is what the driver laid out, as their own; a memory is laid out anew only when nobody uses it."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path

import pytest
import torch

from megappo.controller import host_memory, shared_rows
from megappo.controller.host_memory import HostMemory, door, map_private, stands_open
from megappo.controller.shared_rows import MOST_MEMORIES, MappedRows, Part, SharedRows
from megappo.controller.wire import DTYPES
from megappo.errors import PeerFailed

LARGE = 300_000  # elements of 2 bytes or more: too many to be sent


@pytest.fixture
def shared():
    shared = SharedRows()
    shared.near = {1, 2}
    yield shared
    shared.close()


def mapped_memories() -> int:
    return sum(f"memfd:{host_memory.NAME} " in line for line in Path("/proc/self/maps").read_text().splitlines())


def lay(shared, tensors, ranks=(1, 2), rows=None):
    """The place of one part that all ranks get."""
    part = Part(tensors, rows)
    return shared.lay(dict.fromkeys(ranks, part)).get(part.key)


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(sent, got):
    assert list(sent) == list(got)
    for name in sent:
        assert (got[name].dtype, got[name].shape) == (sent[name].dtype, sent[name].shape)
        assert torch.equal(bits(got[name]), bits(sent[name].detach()))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_arrives_bit_for_bit(shared, dtype):
    noise = torch.randint(0, 256, (8 * LARGE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    x = noise > 100 if dtype == "bool" else noise.view(DTYPES[dtype])
    sent = {"odd": torch.ones(3, dtype=torch.uint8), "x": x, "one": x[:1], "empty": x[:0].reshape(0, 4)}
    assert_same(sent, MappedRows().open(lay(shared, sent)))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(3 * LARGE).reshape(3, LARGE).t(),
        torch.arange(2 * LARGE).reshape(2, LARGE)[:, ::2],
        torch.arange(12 * LARGE).reshape(2, 3, 2, LARGE)[:, 1:].permute(2, 0, 3, 1),
        torch.arange(3).expand(LARGE, 3),
        torch.arange(2 * LARGE)[3 : LARGE + 3],
        torch.ones(LARGE, requires_grad=True),
        torch.full((LARGE,), float("nan"), dtype=torch.bfloat16),
    ],
    ids=["transposed", "strided", "permuted", "expanded", "sliced", "with gradient", "nan"],
)
def test_tensors_that_are_no_plain_blocks_of_memory_arrive(shared, tensor):
    sent = {"x": tensor, "0-dim": torch.tensor(7), "none": torch.zeros(0, 3, dtype=torch.bool)}
    assert_same(sent, MappedRows().open(lay(shared, sent)))


def test_each_part_lies_there_once_and_ranks_far_away_need_no_room(shared):
    tensors = {"x": torch.arange(4 * LARGE).reshape(8, -1), "ids": torch.arange(8)}
    first, second, far = Part(tensors, slice(0, 3)), Part(tensors, slice(3, 4)), Part(tensors, slice(4, 8))
    nothing = Part(tensors, slice(8, 8))
    places = shared.lay({0: nothing, 1: first, 2: second, 3: second, 4: far})  # 3 and 4 are on another host
    assert places.keys() == {nothing.key, first.key, second.key}
    assert shared._lent[0].memory.num_bytes < 5 * LARGE * 4  # of 8 * LARGE * 4, and some for the alignment
    for part in (first, second):
        assert_same(part.cut(), MappedRows().open(places[part.key]))
    assert_same(nothing.cut(), shared.own_rows(nothing, places))


def test_what_is_written_to_rows_is_seen_by_nobody_else(shared):
    batch = {"x": torch.zeros(LARGE), "y": torch.ones(LARGE)}
    part = Part(batch, None)
    places = shared.lay({0: part, 1: part, 2: part})
    one, other, own = MappedRows().open(places[part.key]), MappedRows().open(places[part.key]), shared.own_rows(part, places)
    one["x"].fill_(1)
    own["x"].fill_(2)
    assert [float(t["x"].sum()) for t in (batch, other, one, own)] == [0, 0, LARGE, 2 * LARGE]
    batch["x"].fill_(3)
    batch["y"].fill_(3)
    assert [float(t["x"].sum()) for t in (other, one, own)] == [0, LARGE, 2 * LARGE]
    assert [float(t["y"].sum()) for t in (other, one, own)] == [LARGE] * 3
    assert_same({"x": torch.zeros(LARGE)}, {"x": MappedRows().open(places[part.key])["x"]})  # nor does it reach the memory


def test_a_memory_is_used_again_once_all_ranks_are_done_with_it(shared):
    rank = MappedRows()
    places = []
    for value in range(3):
        place = lay(shared, {"x": torch.full((LARGE - value,), float(value))})
        assert float(rank.open(place)["x"].mean()) == value
        assert rank.held() == []
        shared.answered(1, rank.held())
        shared.answered(2, [])
        places.append(place)
    assert len({place["path"] for place in places}) == len(shared._lent) == 1
    lay(shared, {"x": torch.zeros(LARGE)})
    shared.answered(1, [])  # but not 2
    assert lay(shared, {"x": torch.zeros(LARGE)})["path"] != places[0]["path"]


def test_what_a_worker_keeps_stays_as_it_is(shared):
    rank, place = MappedRows(), lay(shared, {"x": torch.ones(LARGE), "y": torch.ones(LARGE)}, ranks=[1])
    kept = rank.open(place)["x"][5:].view(-1, 5)  # a view of a part of one of them
    for value in (2.0, 3.0):
        assert rank.held() == [place["memory"]]
        shared.answered(1, rank.held())
        new = lay(shared, {"x": torch.full((LARGE,), value)}, ranks=[1])
        assert new["memory"] != place["memory"]
        assert float(rank.open(new)["x"].mean()) == value
        rank.sweep()
    assert kept.unique().tolist() == [1]
    del kept
    assert rank.held() == []
    shared.answered(1, [])
    assert len(shared._lent) == 2
    assert lay(shared, {"x": torch.ones(2 * LARGE)}, ranks=[1]) is not None
    assert len(shared._lent) == 2  # a larger one in the place of the small ones that fit as well


def test_rank_0_keeps_what_it_was_given_too(shared):
    part = Part({"x": torch.ones(LARGE)}, None)
    places = shared.lay({0: part, 1: part})
    own = shared.own_rows(part, places)
    shared.answered(1, [])
    shared.sweep()
    lay(shared, {"x": torch.zeros(LARGE)}, ranks=[1])
    assert own["x"].unique().tolist() == [1]


def test_an_answer_that_returns_what_was_given_holds_nothing_back(shared):
    rank = MappedRows()
    given = rank.open(lay(shared, {"x": torch.arange(LARGE), "ids": torch.arange(4)}))
    other = torch.ones(3)
    found = rank.without({"ids": given["ids"], "part": given["x"][7:9], "other": other, "empty": given["x"][:0]})
    assert found["other"] is other
    del given
    assert rank.held() == []
    assert (found["ids"].tolist(), found["part"].tolist()) == ([0, 1, 2, 3], [7, 8])


def test_nothing_stays_mapped_or_open_once_it_is_not_in_use(shared):
    before = mapped_memories(), len(os.listdir("/proc/self/fd"))
    rank = MappedRows()
    kept = rank.open(lay(shared, {"x": torch.arange(LARGE)}))["x"]
    shared.close()
    rank.sweep()
    assert mapped_memories() == before[0] + 1
    assert int(kept[-1]) == LARGE - 1  # it outlives its owner
    del kept
    rank.sweep()
    gc.collect()
    assert (mapped_memories(), len(os.listdir("/proc/self/fd"))) == before
    assert not [name for name in os.listdir("/dev/shm") if host_memory.NAME in name]


def test_little_goes_over_sockets_as_does_what_no_near_rank_is_called_with(shared):
    assert lay(shared, {"x": torch.zeros(shared_rows.SHARED_FROM_BYTES - 1, dtype=torch.uint8)}) is None
    assert lay(shared, {"x": torch.zeros(shared_rows.SHARED_FROM_BYTES, dtype=torch.uint8)}) is not None
    assert lay(shared, {"x": torch.zeros(LARGE)}, ranks=[0, 3]) is None
    assert lay(shared, None) is None
    part = Part({"x": torch.zeros(LARGE)}, None)
    own = shared.own_rows(part, {})
    own["x"].fill_(1)
    assert part.tensors["x"].unique().tolist() == [0]  # a copy all the same


def test_where_there_is_too_little_memory_sockets_are_used_and_it_is_said_once(shared, monkeypatch, caplog):
    monkeypatch.setattr(host_memory, "available_memory_bytes", lambda: 1_000_000)
    with caplog.at_level(logging.WARNING):
        assert lay(shared, {"x": torch.zeros(LARGE)}) is None
        assert lay(shared, {"x": torch.zeros(LARGE)}) is None
        assert lay(shared, {"x": torch.zeros(200_000)}) is not None
    assert [record.getMessage() for record in caplog.records] == [
        "1.1 MiB of a call's tensors do not go into shared memory: 1.0 MiB are free; the ranks of this host get them over "
        "sockets, a copy each, which is slower"
    ]


def test_workers_that_keep_the_tensors_of_many_calls_do_not_fill_the_memory(shared, caplog):
    rank, kept = MappedRows(), []
    for _ in range(MOST_MEMORIES):
        kept.append(rank.open(lay(shared, {"x": torch.zeros(LARGE)}, ranks=[1])))
        shared.answered(1, rank.held())
    assert lay(shared, {"x": torch.zeros(LARGE)}) is None
    assert f"workers keep the tensors of {MOST_MEMORIES} calls" in caplog.text
    kept.pop()
    shared.answered(1, rank.held())
    assert lay(shared, {"x": torch.zeros(LARGE)}) is not None


def test_a_dtype_that_does_not_travel_is_refused_before_anything_is_laid_out(shared):
    with pytest.raises(TypeError, match=r"'z' is torch\.complex64"):
        lay(shared, {"x": torch.zeros(LARGE), "z": torch.zeros(1, dtype=torch.complex64)})
    assert not shared._lent


def test_a_door_opens_for_those_who_know_the_token_and_nothing_else_is_opened(tmp_path):
    with door("secret") as path:
        assert stands_open(path, "secret")
        assert not stands_open(path, "other")
    assert not stands_open(path, "secret")
    assert not stands_open("", "secret")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # to open it would block
    assert not stands_open(str(pipe), "secret")
    reading, writing = os.pipe()
    assert not stands_open(f"/proc/{os.getpid()}/fd/{reading}", "secret")
    os.close(reading)
    os.close(writing)


def test_memory_whose_owner_is_gone_is_another_ranks_failure():
    memory = HostMemory(1000)
    memory.close()
    with pytest.raises(PeerFailed, match="the owner of the memory is gone"):
        map_private(memory.path, 0, 1000)
