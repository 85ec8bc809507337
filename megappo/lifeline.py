"""How does a process end with the one that started it? The kernel's parent-death signal, and a thread that watches the parent."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, kernel_signal: bool = True, on_death: Callable[[], None] | None = None) -> None:
    """End this process once `parent_pid` is gone.

    kernel_signal: SIGKILL from the kernel, at once, even where Python is stuck. It follows the *thread* that started this
    process, so the caller turns it off where that thread may end earlier. on_death runs first where the watching thread notices.
    """
    if kernel_signal:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    threading.Thread(target=_watch, args=(parent_pid, on_death), daemon=True, name="megappo-lifeline").start()


def _watch(parent_pid: int, on_death: Callable[[], None] | None) -> None:
    while os.getppid() == parent_pid:  # also true-to-false for a parent that died before this thread started
        time.sleep(0.25)
    if on_death is not None:
        on_death()
    os.kill(os.getpid(), signal.SIGKILL)


def kill_own_group() -> None:
    """SIGKILL for this process and all in its process group. Only for a process that leads its own group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
