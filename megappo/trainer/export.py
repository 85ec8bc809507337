"""How do the trained weights leave? As a Hugging Face folder, from the very buffer that the engine was given."""

from __future__ import annotations

from pathlib import Path

from megappo.config.schema import Config
from megappo.pp_weights.hf_io import write_hf_folder
from megappo.trainer.workers import WeightPublisher


def export_published(folder: Path, publisher: WeightPublisher, config: Config) -> None:
    """Write the version that was published last: weights, config and tokenizer files."""
    assert publisher.buffer is not None, "rank 0 receives the weights"
    write_hf_folder(folder, publisher.buffer.views().items(), config_from=config.model.path)
