"""How do weights leave, and did they arrive? Folders are written from, and compared with, the very buffer that the engine got."""

from __future__ import annotations

from pathlib import Path

import torch

from megappo.config.schema import Config
from megappo.errors import RunFailed
from megappo.pp_weights.hf_io import HFReader, write_hf_folder
from megappo.trainer.workers import WeightPublisher


def export_published(folder: Path, publisher: WeightPublisher, config: Config) -> None:
    """Write the version that was published last: weights, config and tokenizer files."""
    assert publisher.buffer is not None, "rank 0 receives the weights"
    write_hf_folder(folder, publisher.buffer.views().items(), config_from=config.model.path)


def check_start(publisher: WeightPublisher, config: Config) -> None:
    """Before the first step: what was published must be the folder's tensors, name by name and bit for bit.

    Raises RunFailed with the names that differ: the way from the folder to the chunks and back is then wrong."""
    assert publisher.buffer is not None, "rank 0 receives the weights"
    with HFReader(config.model.path) as reader:
        wrong = [
            name
            for name, tensor in publisher.buffer.views().items()
            if name not in reader.shapes or not torch.equal(tensor, reader.read(name).to(tensor.dtype))
        ]
    if wrong:
        raise RunFailed(
            f"the weights that were published at the start are not those of {config.model.path}: {len(wrong)} tensors differ, "
            f"first {', '.join(wrong[:3])}"
        )
