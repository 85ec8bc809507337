"""How do weights leave, and did they arrive? Written from, and compared with, the very buffer that the engine got."""

from __future__ import annotations

from pathlib import Path

import torch

from megappo.checkpoint.source import hf_tensors
from megappo.config.schema import Config
from megappo.errors import RunFailed
from megappo.pp_weights.hf_writer import write_hf_folder
from megappo.trainer.workers import WeightPublisher


def export_published(folder: Path, publisher: WeightPublisher, config: Config) -> None:
    """Write the version that was published last: weights, config and tokenizer files."""
    assert publisher.buffer is not None, "rank 0 receives the weights"
    views = publisher.buffer.views()
    write_hf_folder(folder, views.items(), {name: view.dtype for name, view in views.items()}, config_from=config.model.path)


def check_start(publisher: WeightPublisher, config: Config) -> None:
    """Before the first step: what was published must be the tensors of model.path, name by name and bit for bit.

    Raises RunFailed with the names that differ: the way from the folder to the chunks and back is then wrong."""
    assert publisher.buffer is not None, "rank 0 receives the weights"
    left = dict(publisher.buffer.views())
    wrong = []
    for name, tensor in hf_tensors(config.model.path):
        view = left.pop(name, None)
        if view is None or not torch.equal(view, tensor.to(view.dtype)):
            wrong.append(name)
    wrong += left
    if wrong:
        raise RunFailed(
            f"the weights that were published at the start are not those of {config.model.path}: {len(wrong)} tensors differ, "
            f"first {', '.join(wrong[:3])}"
        )
