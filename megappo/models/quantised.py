"""Is a model path quantised, and what says so? `quantisation`. Training and hand-over know float weights only. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from megappo.models.shape import hf_files, read_hf_config

_CONFIG_KEYS = ("quantization_config", "compression_config")
_MODELOPT_FILE = "hf_quant_config.json"
_NARROW = ("F8", "F6", "F4", "I8", "U8", "I4", "U4")
"""How the dtypes of quantised weights begin in a safetensors file."""


def quantisation(path: str | Path) -> str | None:
    """What makes a Hugging Face folder or checkpoint a quantised one, None for any other. Reads config.json and the headers of
    the weights. Raises UserError as `read_hf_config` does."""
    config = read_hf_config(path)
    for key in _CONFIG_KEYS:
        if found := config.get(key):
            method = found.get("quant_method") if isinstance(found, dict) else None
            return f"config.json has {key}" + (f" with quant_method={method!r}" if method else "")
    if (hf_files(path) / _MODELOPT_FILE).is_file():
        return f"it has {_MODELOPT_FILE}"
    for file in sorted(Path(path).glob("*.safetensors")):
        for name, dtype in _dtypes(file).items():
            if dtype.startswith(_NARROW):
                return f"{name} is {dtype} in {file.name}"
    return None


def _dtypes(file: Path) -> dict[str, str]:
    """Tensor name -> dtype, from a safetensors header; empty for a file that has none (the reader of the weights says so)."""
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if length > file.stat().st_size:
                return {}
            header = json.loads(opened.read(length))
        return {name: str(entry["dtype"]) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
