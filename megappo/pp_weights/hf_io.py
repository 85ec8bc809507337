"""How are weights read from and written to a Hugging Face folder? Slices in, complete tensors out."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megappo.errors import UserError
from megappo.models.families import shape_of
from megappo.models.shape import ModelShape, read_hf_config
from megappo.pp_weights.mapping import Piece, expected_hf_tensors
from megappo.pp_weights.verify import NamesDiffer, compare_names

logger = logging.getLogger("megappo")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
COPIED = (
    "generation_config.json",
    "tokenizer*",
    "*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
"""Files of the source folder, beside config.json, that an exported folder gets as they are."""


class HFReader:
    """Slices of the tensors in a Hugging Face folder (one safetensors file, or shards with an index). Nothing is read but headers
    until it is asked for; a file stays open until `close`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files: dict[str, Any] = {}
        self._file_of = self._locate()
        self.shapes: dict[str, tuple[int, ...]] = {name: tuple(self._slice(name).get_shape()) for name in self._file_of}

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """[start, stop) along `dim` (0 or 1) of one tensor, in the folder's dtype."""
        part = slice(start, stop)
        tensor: torch.Tensor = self._slice(name)[part] if dim == 0 else self._slice(name)[:, part]
        return tensor

    def check(self, shape: ModelShape, absent_as_zeros: Collection[str] = ()) -> None:
        """Raise UserError unless the folder holds the model: missing, unexpected and misshapen tensors in one message.

        A head that the model does not use (lm_head of a tied or a value model) may be there: it is skipped, with a note."""
        skipped = {name for name in self._file_of if name.endswith(".rotary_emb.inv_freq")}  # constants that old exports carry
        if "lm_head.weight" in self._file_of and (shape.tied or shape.head == "value"):
            skipped.add("lm_head.weight")
            reason = "the model has a value head" if shape.head == "value" else "the embeddings are tied"
            logger.info("%s: lm_head.weight is skipped: %s", self.folder, reason)
        _compare(self.folder, expected_hf_tensors(shape), self.shapes, absent_as_zeros, skipped)

    def close(self) -> None:
        self._files.clear()

    def __enter__(self) -> HFReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index = self.folder / INDEX
        if not index.is_file():
            if not (self.folder / SINGLE).is_file():
                raise UserError(
                    f"model.path={str(self.folder)!r} has neither {SINGLE} nor {INDEX}; give a folder with safetensors weights"
                )
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        try:
            weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{index}: not a safetensors index ({error!r}); copy the file again from the model's source"
            ) from None
        absent = sorted({file for file in weight_map.values() if not (self.folder / file).is_file()})
        if absent:
            raise UserError(
                f"model.path={str(self.folder)!r} lacks {', '.join(absent)}, which {INDEX} names; copy the missing files"
            )
        for file in sorted(set(weight_map.values())):
            lost = sorted({name for name, place in weight_map.items() if place == file} - set(self._open(file).keys()))
            if lost:
                raise UserError(
                    f"{self.folder / file} lacks {', '.join(lost[:5])}, which {INDEX} places there; copy the file again"
                )
        return weight_map

    def _open(self, file: str) -> Any:
        if file not in self._files:
            try:
                self._files[file] = safe_open(self.folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{self.folder / file}: cannot be read as safetensors ({error}); copy the file again") from None
        return self._files[file]

    def _slice(self, name: str) -> Any:
        return self._open(self._file_of[name]).get_slice(name)


@torch.no_grad()
def load_chunk(
    reader: HFReader, pieces: Sequence[Piece], params: Mapping[str, torch.Tensor], absent_as_zeros: Collection[str] = ()
) -> None:
    """Fill one chunk's parameters (local name -> tensor) from the folder, each rank reading its own slices only.

    Rows that no HF tensor covers (vocabulary padding) and tensors of `absent_as_zeros` that the folder lacks become zeros."""
    compare_names(
        {p.param: p.param_shape for p in pieces}, {name: tuple(t.shape) for name, t in params.items()}, "the chunk's parameters"
    )
    wanted = {piece.hf_name: piece.hf_shape for piece in pieces}
    _compare(reader.folder, wanted, {n: s for n, s in reader.shapes.items() if n in wanted}, absent_as_zeros)
    given = [piece for piece in pieces if piece.hf_name in reader.shapes]
    covered = dict.fromkeys(params, 0)
    for piece in given:
        covered[piece.param] += piece.local(params[piece.param]).numel()
    for name, param in params.items():
        if covered[name] != param.numel():
            param.zero_()
    for piece in given:
        if piece.start < piece.stop:
            piece.local(params[piece.param]).copy_(piece.as_local(reader.read(piece.hf_name, piece.dim, piece.start, piece.stop)))


def write_hf_folder(
    folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    config_from: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 4 << 30,
) -> Path:
    """Write a complete Hugging Face folder and return its path: weights, and config and tokenizer copied from `config_from`.

    The folder appears under its name only when complete; an older one of that name gives way then. dtype: of the written tensors;
    default: as they are. Raises UserError where the tensors are not exactly those of the model that `config_from` describes."""
    folder, source = Path(folder), Path(config_from)
    draft = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        written = _write_shards(draft, tensors, dtype, max_shard_bytes, tied=shape_of(source).tied)
        shape = shape_of(source, head="value" if "score.weight" in written else "lm")
        _compare(folder, expected_hf_tensors(shape), {name: tuple(tensor_shape) for name, (tensor_shape, _) in written.items()})
        _copy_config(source, draft, dtype or next(iter(written.values()))[1])
        _move_into_place(draft, folder)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return folder


def _write_shards(
    draft: Path, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None, max_shard_bytes: int, tied: bool
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    written: dict[str, tuple[torch.Size, torch.dtype]] = {}
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    total_bytes = shard_bytes = 0

    def flush() -> None:
        nonlocal shard_bytes
        shards.append(list(shard))
        save_file(shard, draft / f"shard-{len(shards)}", metadata={"format": "pt"})
        shard.clear()
        shard_bytes = 0

    for name, tensor in tensors:
        if tied and name == "lm_head.weight":
            logger.info("lm_head.weight is not written: the embeddings are tied")
            continue
        if name in written:
            raise UserError(f"{name} is given twice; each tensor is written once")
        if shard and shard_bytes + tensor.nbytes > max_shard_bytes:
            flush()
        # a copy of its own: views of one buffer share a storage, which safetensors refuses
        shard[name] = tensor.detach().to(device="cpu", dtype=dtype or tensor.dtype, copy=True).contiguous()
        written[name] = (tensor.shape, shard[name].dtype)
        shard_bytes += shard[name].nbytes
        total_bytes += shard[name].nbytes
    flush()
    if len(shards) == 1:
        (draft / "shard-1").rename(draft / SINGLE)
        return written
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (draft / f"shard-{number}").rename(draft / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return written


def _copy_config(source: Path, draft: Path, dtype: torch.dtype) -> None:
    config = read_hf_config(source)
    key = "dtype" if "dtype" in config else "torch_dtype"
    config[key] = str(dtype).removeprefix("torch.")
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for pattern in COPIED:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copy2(file, draft / file.name)


def _move_into_place(draft: Path, folder: Path) -> None:
    old = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    draft.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _compare(
    folder: Path,
    expected: Mapping[str, tuple[int, ...]],
    got: Mapping[str, tuple[int, ...]],
    allow_missing: Collection[str] = (),
    allow_unexpected: Collection[str] = (),
) -> None:
    try:
        compare_names(expected, got, f"{folder}: tensors do not fit config.json", allow_missing, allow_unexpected)
    except NamesDiffer as error:
        raise UserError(f"{error}; copy the folder again from the model's source, or mend config.json") from None
