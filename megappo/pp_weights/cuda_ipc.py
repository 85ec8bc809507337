"""How does another process of this host read a buffer, in host memory or on a GPU? `memory_of`; `DeviceBuffer` is the GPU's.

CUDA IPC gives a second process the very memory of the first: nothing is copied. It has not been run on a GPU yet.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megappo.errors import RunFailed
from megappo.pp_weights.buffer import WeightBuffer, views_of
from megappo.pp_weights.manifest import Manifest

PREFIX = "cuda-ipc:"


class DeviceBuffer:
    """Bytes in this process's GPU memory that other processes of the host can open. The counterpart of `WeightBuffer`.

    Memory: `num_bytes` on `device`, until closed here and in every process that has it open."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._data: torch.Tensor | None = torch.zeros(max(num_bytes, 1), dtype=torch.uint8, device=device)
        self.path = PREFIX + _export(self._data)

    @property
    def data(self) -> torch.Tensor:
        """All bytes, uint8."""
        if self._data is None:
            raise RunFailed("the weight buffer is closed")
        return self._data

    def close(self) -> None:
        self._data = None


@contextmanager
def memory_of(path: str, manifest: Manifest) -> Iterator[dict[str, torch.Tensor]]:
    """Views by name into the memory at `path`, of whichever kind; nothing may be kept beyond the block.

    Raises RunFailed where it cannot be opened from here."""
    if path.startswith(PREFIX):
        yield views_of(_import(path.removeprefix(PREFIX)), manifest)
        torch.cuda.current_stream().synchronize()  # the sender writes again once it is told that this is done
        return
    buffer = WeightBuffer.open(path, manifest)
    try:
        yield buffer.views()
    finally:
        buffer.close()


def _export(data: torch.Tensor) -> str:
    """JSON of what torch needs to open the memory elsewhere, and of which GPU it lies on."""
    device, handle, size, offset, counter_handle, counter_offset, event_handle, event_sync = data.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return json.dumps(
        {
            "gpu": str(torch.cuda.get_device_properties(device).uuid),
            "num_bytes": data.numel(),
            "handle": _text(handle),
            "storage_bytes": size,
            "storage_offset": offset,
            "counter_handle": _text(counter_handle),
            "counter_offset": counter_offset,
            "event_handle": _text(event_handle),
            "event_sync": event_sync,
        }
    )


def _import(text: str) -> torch.Tensor:
    fields = json.loads(text)
    storage = torch.UntypedStorage._new_shared_cuda(
        _device_of(fields["gpu"]),
        _raw(fields["handle"]),
        fields["storage_bytes"],
        fields["storage_offset"],
        _raw(fields["counter_handle"]),
        fields["counter_offset"],
        _raw(fields["event_handle"]),
        fields["event_sync"],
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[: fields["num_bytes"]]


def _device_of(uuid: str) -> int:
    """Index, in this process, of the GPU with that id: CUDA_VISIBLE_DEVICES numbers GPUs anew in each process."""
    seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise RunFailed(
            f"the weights lie on GPU {uuid}, which this engine process cannot see (it sees {', '.join(seen) or 'none'}); let the "
            f"engine see it, or use pp_weights.transport=shared_memory"
        )
    return seen.index(uuid)


def _text(raw: Any) -> str:
    return base64.b64encode(raw).decode()


def _raw(text: str) -> bytes:
    return base64.b64decode(text)
