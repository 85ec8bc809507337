"""How does a process lend memory to others of its host? `HostMemory`: a memfd, which they map through /proc, each for itself.

It has no name in any file system: nothing is left whatever dies, and the size of /dev/shm is no limit.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from megappo.errors import PeerFailed, RunFailed
from megappo.pp_weights.buffer import available_memory_bytes
from megappo.pp_weights.copying import Copies

NAME = "megappo_rows"
MADV_POPULATE_READ = 22  # Python does not name it


class HostMemory:
    """The owner's end. Raises OSError where there is not as much; it is allocated now, so that no rank is killed in mid-write."""

    def __init__(self, num_bytes: int) -> None:
        available = available_memory_bytes()
        if available is not None and num_bytes > available:
            raise OSError(errno.ENOMEM, f"{available / 2**20:.1f} MiB are free")
        self.num_bytes = num_bytes
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        self._close_fd = weakref.finalize(self, os.close, fd)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            self._close_fd()
            raise
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self._data = torch.frombuffer(memory, dtype=torch.uint8)

    def fill(self, tensors: Iterable[tuple[int, Tensor]]) -> None:
        """Put each tensor, as one block, at its offset."""
        rooms = [(self._data[offset : offset + tensor.nbytes], tensor.detach()) for offset, tensor in tensors]
        Copies((room.view(tensor.dtype).view(tensor.shape), tensor) for room, tensor in rooms).run()

    def close(self) -> None:
        """Let go of it; it lives until the last process has unmapped it."""
        self._data = torch.empty(0, dtype=torch.uint8)
        self._close_fd()


def map_private(path: str, offset: int, num_bytes: int) -> mmap.mmap:
    """Another process's memory: what is written here stays here, what is not shows what the owner writes. `offset` is that of a
    page."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(fd, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError) as error:
        raise PeerFailed(f"the owner of the memory is gone ({error})") from error
    except OSError as error:
        raise RunFailed(f"cannot map {num_bytes / 2**20:.1f} MiB of the memory {path} ({error.strerror})") from error
    with contextlib.suppress(OSError):  # Linux before 5.14: the pages come as they are read
        memory.madvise(MADV_POPULATE_READ)
    return memory


@contextlib.contextmanager
def door(token: str) -> Iterator[str]:
    """A path behind which those find the token, by `stands_open`, that can map this process's memory. Empty: nobody can."""
    if not hasattr(os, "memfd_create"):  # not Linux
        yield ""
        return
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    try:
        os.write(fd, token.encode())
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


def stands_open(path: str, token: str) -> bool:
    """Whether this process can open the door. On another host the path leads nowhere, or to what must not be opened."""
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME} "):
            return False
        with open(path, "rb") as file:
            return file.read() == token.encode()
    except OSError:
        return False
