"""How do the frames of a message go over a zmq socket? Large ones without a copy, none dropped, no wait without an end."""

from __future__ import annotations

from typing import Any

import zmq

COPY_BELOW_BYTES = 65536  # a small frame is copied sooner than handed to zmq's thread for keeping
POLL_MS = 200  # how often a wait looks at the watchdog


def set_options(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)  # no limit: a message is never dropped
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.IPV6, 1)  # and IPv4
    socket.setsockopt(zmq.RCVTIMEO, POLL_MS)


def send_frames(socket: zmq.Socket[bytes], frames: list[Any]) -> None:
    for frame in frames[:-1]:
        socket.send(frame, zmq.SNDMORE, copy=len(frame) < COPY_BELOW_BYTES)
    socket.send(frames[-1], copy=len(frames[-1]) < COPY_BELOW_BYTES)


def receive_frames(socket: zmq.Socket[bytes]) -> list[Any] | None:
    """The frames of one message, none if there is none within POLL_MS. Tensors are built on the received memory."""
    try:
        frames: list[Any] = [socket.recv(copy=False)]
    except zmq.Again:
        return None
    while frames[-1].more:
        frames.append(socket.recv(copy=False))
    return frames
