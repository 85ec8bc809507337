"""How do trainer and engine process talk? Messages over a socket: a JSON header, then raw frames.

Wire: uint32 length of the header, the header (JSON, "frames" holds their sizes), the frames. No pickle.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("<I")


class ChannelClosed(Exception):
    """The other side has closed the socket or is gone."""


class Channel:
    """One end of a stream socket. `on_idle` runs each `idle_s` while a message is awaited; it may raise to stop the wait."""

    def __init__(self, sock: socket.socket, on_idle: Callable[[], None] | None = None, idle_s: float = 0.2) -> None:
        self._sock = sock
        self._on_idle = on_idle
        sock.settimeout(idle_s if on_idle is not None else None)

    def send(self, header: dict[str, Any], *frames: bytes) -> None:
        head = json.dumps({**header, "frames": [len(frame) for frame in frames]}).encode()
        pending = memoryview(b"".join((_LENGTH.pack(len(head)), head, *frames)))
        while pending:
            try:
                pending = pending[self._sock.send(pending) :]
            except TimeoutError:
                self._idle()
            except OSError as error:
                raise ChannelClosed(str(error)) from error

    def recv(self) -> tuple[dict[str, Any], list[bytes]]:
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        header = json.loads(self._read(length))
        return header, [self._read(size) for size in header.pop("frames")]

    def close(self) -> None:
        self._sock.close()

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        pending = memoryview(data)
        while pending:
            try:
                count = self._sock.recv_into(pending)
            except TimeoutError:
                self._idle()
                continue
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if count == 0:
                raise ChannelClosed("end of stream")
            pending = pending[count:]
        return bytes(data)

    def _idle(self) -> None:
        if self._on_idle is not None:
            self._on_idle()
