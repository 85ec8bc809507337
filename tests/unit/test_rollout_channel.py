"""Does what one process sends arrive in the other, and does a dead peer end the wait?"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from megappo.pp_weights.update import Update, pack_update, unpack_update
from megappo.rollout.channel import Channel, ChannelClosed
from megappo.rollout.engine import Completion
from megappo.rollout.wire import (
    pack_completions,
    pack_ragged,
    pack_seeds,
    unpack_completions,
    unpack_ragged,
    unpack_seeds,
)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()


def test_a_message_larger_than_the_sockets_buffer_arrives_whole(sockets: tuple[socket.socket, socket.socket]) -> None:
    left, right = Channel(sockets[0]), Channel(sockets[1])
    payload = bytes(range(256)) * 8192  # 2 MiB
    sender = threading.Thread(target=left.send, args=({"op": "x"}, payload, b""))
    sender.start()
    header, frames = right.recv()
    sender.join()
    assert header == {"op": "x"}
    assert frames == [payload, b""]


def test_a_closed_peer_is_an_error_not_a_wait(sockets: tuple[socket.socket, socket.socket]) -> None:
    left, right = Channel(sockets[0]), Channel(sockets[1])
    left.close()
    with pytest.raises(ChannelClosed):
        right.recv()
    with pytest.raises(ChannelClosed):
        right.send({})


def test_a_silent_peer_lets_the_idle_check_end_the_wait(sockets: tuple[socket.socket, socket.socket]) -> None:
    def give_up() -> None:
        raise RuntimeError("peer is gone")

    with pytest.raises(RuntimeError, match="peer is gone"):
        Channel(sockets[1], on_idle=give_up, idle_s=0.01).recv()


def test_rows_of_any_length_survive() -> None:
    rows = [[1, 2, 3], [], [2**31 - 1], [0]]
    assert unpack_ragged(*pack_ragged(rows)) == rows
    assert unpack_ragged(*pack_ragged([])) == []
    assert unpack_seeds(pack_seeds([0, 2**63 - 1])) == [0, 2**63 - 1]


def test_completions_survive_with_ids_and_log_probs_as_they_were() -> None:
    frames = pack_completions([[5, 2], [7]], [[-0.1, -1e-9], [-123.456]], ["stop", "length"])
    assert unpack_completions(frames, 9) == [
        Completion((5, 2), (-0.1, -1e-9), "stop", 9),
        Completion((7,), (-123.456,), "length", 9),
    ]


def test_an_announced_update_survives_json() -> None:
    update = Update(3, {"a.weight": ("float32", (2, 3)), "b": ("bfloat16", ())}, "f", 2, shards=4, verify=True)
    assert unpack_update(json.loads(json.dumps(pack_update(update)))) == update
