"""What runs in the engine's own process? `python -m megappo.rollout.vllm_child`: vLLM, serving one trainer over a socket.

Started by `vllm_engine.VllmEngine` only. It leads its own process group and ends, with vLLM's workers, when the trainer is gone.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import textwrap
from typing import Any, NoReturn

from megappo.errors import RunFailed, UserError
from megappo.lifeline import die_with_parent, kill_own_group
from megappo.pp_weights.update import unpack_update
from megappo.rollout.channel import Channel, ChannelClosed
from megappo.rollout.engine import SamplingParams
from megappo.rollout.wire import pack_completions, unpack_ragged, unpack_seeds

logger = logging.getLogger("megappo")


def main(argv: list[str] | None = None) -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m megappo.rollout.vllm_child")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the trainer")
    parser.add_argument("--parent", type=int, required=True, help="process id of the trainer")
    parser.add_argument("--kernel-signal", type=int, required=True, help="1: the starting thread lives as long as the trainer")
    args = parser.parse_args(argv)
    die_with_parent(args.parent, bool(args.kernel_signal), kill_own_group)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    sock = socket.socket(fileno=args.fd)
    os.set_inheritable(args.fd, False)
    os.register_at_fork(after_in_child=sock.close)  # a worker that held it would hide this process's death from the trainer
    channel = Channel(sock)
    code = 0
    try:
        code = _run(channel)
    except ChannelClosed:
        pass  # the trainer has closed the engine, or is gone
    except BaseException:
        logger.exception("the engine process fails")
        code = 1
    logging.shutdown()
    os._exit(code)  # unwinding vLLM's modules takes seconds


def _run(channel: Channel) -> int:
    """Serve until the trainer closes the socket (ChannelClosed). Returns where vLLM could not start."""
    header, _ = channel.recv()
    try:
        server = Server(header["settings"])
    except Exception as error:
        logger.exception("vLLM did not start")
        _reply_error(channel, error)
        return 1
    try:
        channel.send({"ok": True})
        while True:
            header, frames = channel.recv()
            try:
                reply = server.operations[header["op"]](header, frames)
            except Exception as error:
                logger.exception("%s failed", header["op"])
                _reply_error(channel, error)
            else:
                channel.send({"ok": True}, *reply)
    finally:
        server.stop()


def _reply_error(channel: Channel, error: Exception) -> None:
    message = str(error) if isinstance(error, UserError | RunFailed) else f"{type(error).__name__}: {error}"
    message = textwrap.shorten(message, 600)  # one line; the log has all of it
    channel.send({"ok": False, "error": message, "user": isinstance(error, UserError)})


class Server:
    """vLLM and the operations that the trainer may ask for; each takes a header and frames and gives frames."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from megappo.rollout import vllm_adapter
        from megappo.rollout.vllm_drive import Updates

        self._vllm = vllm_adapter
        self._settings = vllm_adapter.VllmSettings(**settings)
        self._llm = vllm_adapter.start(self._settings)
        self._updates = Updates(self._llm, self._settings.tp, self._settings.zero_copy)
        self.operations = {
            "generate": self.generate,
            "start_update": self.start_update,
            "load": self.load,
            "finish_update": self.finish_update,
            "sleep": self.sleep,
            "wake": self.wake,
        }

    def generate(self, header: dict[str, Any], frames: list[bytes]) -> tuple[bytes, ...]:
        prompts, lengths, seeds = frames
        sampling = SamplingParams(**{**header["sampling"], "stop_token_ids": tuple(header["sampling"]["stop_token_ids"])})
        return pack_completions(*self._vllm.generate(self._llm, unpack_ragged(prompts, lengths), sampling, unpack_seeds(seeds)))

    def start_update(self, header: dict[str, Any], frames: list[bytes]) -> tuple[bytes, ...]:
        self._updates.start(unpack_update(json.loads(frames[0])))
        return ()

    def load(self, header: dict[str, Any], frames: list[bytes]) -> tuple[bytes, ...]:
        """frames: the manifest of each path, as JSON, for the workers."""
        self._updates.load([(path, frame.decode()) for path, frame in zip(header["paths"], frames, strict=True)])
        return ()

    def finish_update(self, header: dict[str, Any], frames: list[bytes]) -> tuple[bytes, ...]:
        return (json.dumps({"cloned_bytes": self._updates.finish()}).encode(),)

    def sleep(self, header: dict[str, Any], frames: list[bytes]) -> tuple[bytes, ...]:
        self._vllm.sleep(self._llm, self._settings)
        return ()

    def stop(self) -> None:
        self._vllm.stop()

    def wake(self, header: dict[str, Any], frames: list[bytes]) -> tuple[bytes, ...]:
        self._vllm.wake(self._llm, self._settings)
        return ()


if __name__ == "__main__":
    main()
