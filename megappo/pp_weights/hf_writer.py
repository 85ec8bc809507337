"""How is a complete Hugging Face folder written? Tensor by tensor into shards with an index; config and tokenizer come along."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path

import torch

from megappo.errors import UserError
from megappo.models.families import architecture_of, shape_of
from megappo.models.shape import ModelShape, hf_files, read_hf_config
from megappo.pp_weights.folders import move_into_place, start_draft
from megappo.pp_weights.hf_io import INDEX, SINGLE, compare_with_config
from megappo.pp_weights.mapping import expected_hf_tensors
from megappo.pp_weights.safetensors_file import SafetensorsFile

logger = logging.getLogger("megappo")

MAX_SHARD_BYTES = 4 << 30
Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
COPIED = (
    "generation_config.json",
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
"""Files beside config.json that go wherever the model goes, as they are."""


def write_hf_folder(
    folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    dtypes: Mapping[str, torch.dtype],
    config_from: str | Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a complete Hugging Face folder and return its path. One tensor is in memory at a time.

    The folder appears under its name only when complete; an older one of that name gives way then.
    dtypes: of each tensor that will come, as it is to be written. A lm_head.weight of a tied model is left out.
    config_from: model path whose config, tokenizer and generation config are carried along.
    Raises UserError unless the tensors are exactly those of the model that config.json describes."""
    folder = Path(folder)
    shape = shape_of(config_from, head="value" if "score.weight" in dtypes else "lm")
    sizes = expected_hf_tensors(shape)
    wanted = {name: dtype for name, dtype in dtypes.items() if not (shape.tied and name == "lm_head.weight")}
    compare_with_config(folder, sizes, {name: sizes.get(name, ()) for name in wanted})
    layout = {name: (sizes[name], dtype) for name, dtype in wanted.items()}
    draft = start_draft(folder, sum(map(_num_bytes, layout.values())))
    try:
        written = _write_shards(draft, tensors, layout, max_shard_bytes)
        compare_with_config(folder, sizes, {name: sizes[name] for name in written})
        carry_files(config_from, draft, shape, largest_dtype(wanted, sizes))
        move_into_place(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return folder


def carry_files(config_from: str | Path, folder: Path, shape: ModelShape, dtype: torch.dtype) -> None:
    """Copy config.json, which is made to name the head and the dtype, and the files of tokenizer and generation."""
    source = hf_files(config_from)
    config = read_hf_config(config_from)
    dtype_key = "dtype" if "dtype" in config or "torch_dtype" not in config else "torch_dtype"
    adapted = config | {"architectures": [architecture_of(shape)], dtype_key: str(dtype).removeprefix("torch.")}
    if shape.head == "value" and config.get("num_labels") != 1 and len(config.get("id2label") or ()) != 1:
        adapted |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}  # transformers counts the labels here
        adapted.pop("num_labels", None)
    if adapted == config:
        shutil.copyfile(source / "config.json", folder / "config.json")
    else:
        (folder / "config.json").write_text(json.dumps(adapted, indent=2) + "\n", encoding="utf-8")
    for pattern in COPIED:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)


def largest_dtype(dtypes: Mapping[str, torch.dtype], sizes: Mapping[str, tuple[int, ...]]) -> torch.dtype:
    """The dtype that most elements have: what config.json names."""
    counts: Counter[torch.dtype] = Counter()
    for name, dtype in dtypes.items():
        counts[dtype] += prod(sizes[name])
    return counts.most_common(1)[0][0]


def _write_shards(draft: Path, tensors: Iterable[tuple[str, torch.Tensor]], wanted: Layout, max_shard_bytes: int) -> set[str]:
    """Shards are cut in the order of `wanted`; the tensors may come in any. Returns the names that came."""
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, tensor in wanted.items():
        if _num_bytes(tensor) > room and shards[-1]:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= _num_bytes(tensor)
    count = len(shards)
    files = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)] if count > 1 else [SINGLE]
    if count > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        index = {
            "metadata": {"total_size": sum(map(_num_bytes, wanted.values()))},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    written: set[str] = set()
    with ExitStack() as stack:
        file_of: dict[str, SafetensorsFile] = {}
        for file, names in zip(files, shards, strict=True):
            opened = stack.enter_context(SafetensorsFile(draft / file, {name: wanted[name] for name in names}))
            file_of |= dict.fromkeys(names, opened)
        for name, value in tensors:
            if name == "lm_head.weight" and name not in wanted:
                logger.info("lm_head.weight is not written: the embeddings are tied")
                continue
            if name not in wanted:
                raise UserError(f"{name} is not among the tensors that were announced; announce each with its dtype")
            if name in written:
                raise UserError(f"{name} is given twice; each tensor is written once")
            written.add(name)
            file_of[name].write(name, value)
    return written


def _num_bytes(tensor: tuple[tuple[int, ...], torch.dtype]) -> int:
    return prod(tensor[0]) * tensor[1].itemsize
