"""How does the trainer use vLLM? `VllmEngine`: a handle on a child process with an environment and thread count of its own."""

from __future__ import annotations

import contextlib
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
from typing import TYPE_CHECKING, Any, NoReturn

from megappo.errors import RunFailed, UserError
from megappo.models.shape import read_hf_config
from megappo.rollout.channel import Channel, ChannelClosed
from megappo.rollout.engine import Completion, SamplingParams
from megappo.rollout.request import check_request, read_limits
from megappo.rollout.state import EngineState
from megappo.rollout.wire import pack_ragged, pack_seeds, unpack_completions

if TYPE_CHECKING:
    from megappo.pp_weights.buffer import WeightBuffer

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's CPU attention
_LAUNCHER_PREFIXES = ("MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "OMPI_", "PMI_")
_LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LD_PRELOAD")


class VllmEngine:
    """vLLM behind the `RolloutEngine` Protocol. Construction returns at once; the first use waits until the child is ready.

    log_path: file that takes everything the child prints. With device="cuda" it has not run yet (see vllm_adapter).
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
        start_timeout_s: float = 600.0,
    ) -> None:
        self._limits = read_limits(model_path, max_model_len)
        _check_model(model_path, tp, device)
        self.log_path = Path(log_path)
        self._state = EngineState("the vLLM engine")
        self._start_timeout_s = start_timeout_s
        self._ready = False
        self._doing = "start"
        settings = {
            "model_path": str(model_path),
            "dtype": dtype,
            "tp": tp,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "kv_cache_bytes": kv_cache_bytes,
            "gpu_memory_utilization": gpu_memory_utilization,
            "device": device,
        }
        self._process, sock = _start_child(self.log_path, child_environment(os.environ, threads, device))
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

    def update_weights(self, buffer: WeightBuffer, verify: bool) -> None:
        version = buffer.manifest.weight_version
        self._state.begin_update(version)
        try:
            self._call("update", {"path": buffer.path, "verify": verify}, buffer.manifest.to_json().encode())
        except RunFailed as error:
            if self._state.status != "closed":
                self._state.fail_update(version, str(error))
            raise
        self._state.commit(version)

    def sleep(self) -> None:
        """Give weights and KV cache up (on every device, so that a CPU run shows what a GPU run would)."""
        self._state.sleep()
        self._call("sleep", {})

    def wake(self) -> None:
        self._state.wake()
        self._call("wake", {})

    def close(self) -> None:
        self._state.close()
        self._finalizer()

    def _call(self, operation: str, header: dict[str, Any], *frames: bytes) -> list[bytes]:
        self.wait_ready()
        self._doing = operation
        try:
            self._channel.send({"op": operation, **header}, *frames)
        except ChannelClosed:
            self._raise_dead()
        return self._receive()

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
        if info is None:
            how = "closed its socket"
        elif info.si_code == os.CLD_EXITED:
            how = f"ended with exit code {info.si_status}"
        else:
            how = f"was killed by {signal.Signals(info.si_status).name}"
        self._fail(f"the vLLM engine (pid {self.pid}) {how} in {self._doing}; its log {self.log_path} ends: {self._last_line()}")

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


def child_environment(environment: Mapping[str, str], threads: int, device: str) -> dict[str, str]:
    """The child's environment: nothing of the trainer's launcher; vLLM quiet, offline, in one process; `threads` CPU threads."""
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
