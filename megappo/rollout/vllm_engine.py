"""How does the trainer use vLLM? `VllmEngine`: a handle on a child process with an environment and thread count of its own."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NoReturn

from megappo.errors import RunFailed, UserError
from megappo.models.shape import read_hf_config
from megappo.pp_weights.update import Bucket, Update, pack_update
from megappo.rollout.channel import Channel, ChannelClosed
from megappo.rollout.engine import Completion, SamplingParams
from megappo.rollout.request import check_request, read_limits
from megappo.rollout.state import EngineState
from megappo.rollout.wire import pack_ragged, pack_seeds, unpack_completions

logger = logging.getLogger("megappo")

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's CPU attention
_LAUNCHER_PREFIXES = ("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "OMPI_", "PMI_")
_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LD_PRELOAD")


class VllmEngine:
    """vLLM behind the `RolloutEngine` Protocol. Construction returns at once; the first use waits until the child is ready.

    log_path: file that takes everything the child prints. zero_copy: read the weights in the trainer's buffer (on a CPU, tp=1).
    devices: which of the GPUs that this process sees are the engine's; None: all. With device="cuda" it has not run yet (see
    vllm_adapter).
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        log_path: str | Path,
        max_model_len: int,
        dtype: str = "float32",
        tp: int = 1,
        max_num_seqs: int = 128,
        kv_cache_bytes: int = 256 << 20,
        gpu_memory_utilization: float = 0.4,
        threads: int = 1,
        device: str = "cpu",
        devices: tuple[int, ...] | None = None,
        zero_copy: bool = False,
        start_timeout_s: float = 600.0,
    ) -> None:
        self._limits = read_limits(model_path, max_model_len)
        if zero_copy and device != "cpu":
            raise UserError("pp_weights.zero_copy=true is for a CPU, and the engine runs on a GPU; turn it off")
        _check_model(model_path, tp, device)
        self.log_path, self.zero_copy = Path(log_path), zero_copy
        self._state = EngineState("the vLLM engine")
        self._start_timeout_s = start_timeout_s
        self._ready = False
        self._doing = "start"
        self._reading = False  # a bucket is being read, and the reply has not been taken
        settings = {
            "model_path": str(model_path),
            "dtype": dtype,
            "tp": tp,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "kv_cache_bytes": kv_cache_bytes,
            "gpu_memory_utilization": gpu_memory_utilization,
            "device": device,
            "zero_copy": zero_copy,
        }
        self._process, sock = _start_child(self.log_path, child_environment(os.environ, threads, device, devices))
        self._channel = Channel(sock, on_idle=self._check_alive)
        self._finalizer = weakref.finalize(self, _end_child, self._process, self._channel, os.getpid())
        self._deadline = time.monotonic() + start_timeout_s
        self._channel.send({"settings": settings})

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def weight_version(self) -> int | None:
        """The complete version that it holds, or None."""
        return self._state.weight_version

    def wait_ready(self) -> None:
        """Block until vLLM runs in the child. Raises RunFailed where it could not start."""
        if self._ready or self._state.status == "closed":
            return
        self._receive()
        self._ready = True

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]) -> list[Completion]:
        version = self._state.require_generate()
        check_request(self._limits, prompts, sampling, seeds)
        frames = self._call("generate", {"sampling": asdict(sampling)}, *pack_ragged(prompts), pack_seeds(seeds))
        return unpack_completions(frames, version)

    def start(self, update: Update) -> None:
        self._state.begin_update(update.version)
        with self._state.updating():
            self._call("start_update", {}, json.dumps(pack_update(update)).encode())

    def settle(self) -> None:
        if self._reading:
            with self._state.updating():
                self._receive_load()

    def load(self, bucket: Bucket) -> None:
        """Returns at once; `settle` waits until the bucket is read."""
        with self._state.updating():
            self._send("load", {"paths": bucket.paths}, *(manifest.to_json().encode() for manifest in bucket.manifests))
            self._reading = True

    def finish(self) -> None:
        self.settle()
        with self._state.updating() as version:
            (reply,) = self._call("finish_update", {})
            self._state.commit()
        cloned = json.loads(reply)["cloned_bytes"]
        logger.debug("weights version %d is in vLLM; %.1f MB were copied because it held on to them", version, cloned / 1e6)

    def sleep(self) -> None:
        """Give weights and KV cache up (on every device, so that a CPU run shows what a GPU run would)."""
        self._state.sleep()
        self._call("sleep", {})

    def wake(self) -> None:
        self._state.wake()
        self._call("wake", {})

    def fault(self) -> str | None:
        try:
            info = _exit_info(self.pid)
        except ChildProcessError:  # it was closed and reaped
            return None
        # Asked second: `close` says so before it ends the process.
        return None if info is None or self._state.status == "closed" else self._obituary(info, "after")

    def close(self) -> None:
        self._state.close()
        self._finalizer()

    def _call(self, operation: str, header: dict[str, Any], *frames: bytes) -> list[bytes]:
        self._send(operation, header, *frames)
        return self._receive()

    def _send(self, operation: str, header: dict[str, Any], *frames: bytes) -> None:
        self.wait_ready()
        if self._reading:
            with contextlib.suppress(RunFailed):  # of an update that was given up; a dead engine shows in what follows
                self._receive_load()
        self._doing = operation
        try:
            self._channel.send({"op": operation, **header}, *frames)
        except ChannelClosed:
            self._raise_dead()

    def _receive_load(self) -> None:
        self._reading = False
        self._receive()

    def _receive(self) -> list[bytes]:
        try:
            header, frames = self._channel.recv()
        except ChannelClosed:
            self._raise_dead()
        if header["ok"]:
            return frames
        if self._doing == "start":
            self.close()
        raise (UserError if header["user"] else RunFailed)(f"vLLM, {self._doing}: {header['error']} (log: {self.log_path})")

    def _check_alive(self) -> None:
        if not self._ready and time.monotonic() > self._deadline:
            late = f"was not ready after {self._start_timeout_s:.0f} s"
            self._fail(f"the vLLM engine (pid {self.pid}) {late}; its log {self.log_path} ends: {self._last_line()}")
        if _exit_info(self.pid) is not None:
            self._raise_dead()

    def _raise_dead(self) -> NoReturn:
        # the socket may close a moment before the process is gone
        deadline = time.monotonic() + 5.0
        while (info := _exit_info(self.pid)) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        self._fail(self._obituary(info, "in"))

    def _obituary(self, info: os.waitid_result | None, when: Literal["in", "after"]) -> str:
        if info is None:
            how = "closed its socket"
        elif info.si_code == os.CLD_EXITED:
            how = f"ended with exit code {info.si_status}"
        else:
            how = f"was killed by {signal.Signals(info.si_status).name}"
        return f"the vLLM engine (pid {self.pid}) {how} {when} {self._doing}; its log {self.log_path} ends: {self._last_line()}"

    def _fail(self, message: str) -> NoReturn:
        self._state.close(message)
        self.close()
        raise RunFailed(message)

    def _last_line(self) -> str:
        with open(self.log_path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 4096))
            lines = log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "(empty)")


def _exit_info(pid: int) -> os.waitid_result | None:
    """How a child ended, or None while it runs. It is not reaped, so that its id stays ours."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def child_environment(
    environment: Mapping[str, str], threads: int, device: str, devices: Sequence[int] | None = None
) -> dict[str, str]:
    """The child's environment: nothing of the trainer's launcher; vLLM quiet, offline, in one process; `threads` CPU threads.

    devices: which of the GPUs that the trainer sees the child may see; None: the same."""
    env = {k: v for k, v in environment.items() if k not in _LAUNCHER_NAMES and not k.startswith(_LAUNCHER_PREFIXES)}
    package_root = str(Path(__file__).resolve().parents[2])
    env |= {
        "PYTHONPATH": os.pathsep.join(filter(None, (package_root, env.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if devices is not None:
        visible = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(visible[index] if visible else str(index) for index in devices)
    if device == "cpu":
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the trainer's ranks share the cores
    return env


def _check_model(model_path: str | Path, tp: int, device: str) -> None:
    config = read_hf_config(model_path)
    heads = int(config["num_attention_heads"])
    if tp < 1 or heads % tp:
        choices = [d for d in range(1, heads + 1) if heads % d == 0]
        raise UserError(f"rollout.tp={tp} does not divide num_attention_heads={heads} of {model_path}; use one of {choices}")
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    if device == "cpu" and head_dim not in CPU_HEAD_DIMS:
        raise UserError(f"{model_path}: head_dim={head_dim}, but vLLM on a CPU takes {CPU_HEAD_DIMS}; use rollout.engine=hf")


def _start_child(log_path: Path, environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    log_path.parent.mkdir(parents=True, exist_ok=True)
    # the kernel's death signal follows the thread that forks, so it is safe only from the main thread
    from_main = threading.current_thread() is threading.main_thread()
    arguments = ["--fd", str(theirs.fileno()), "--parent", str(os.getpid()), "--kernel-signal", str(int(from_main))]
    with theirs, open(log_path, "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "megappo.rollout.vllm_child", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    return process, ours


def _end_child(process: subprocess.Popen[bytes], channel: Channel, owner_pid: int, grace_s: float = 5.0) -> None:
    """Ask the child to end, then make sure that its whole process group has. The child is reaped last, so its id stays ours."""
    if os.getpid() != owner_pid:
        return  # a fork of the trainer does not own the engine
    channel.close()  # end of stream: the child stops vLLM and leaves
    deadline = time.monotonic() + grace_s
    while group_members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):  # the whole group may be gone
        os.killpg(process.pid, signal.SIGKILL)
    while group_members(process.pid):
        time.sleep(0.01)  # a killed process takes a moment to go
    process.wait()


def group_members(group: int) -> list[int]:
    """Living processes of a process group (zombies are not)."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, _, member_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended meanwhile
            if int(member_group) == group and state not in "ZX":
                members.append(int(entry.name))
    return members
