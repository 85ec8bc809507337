"""How are weights read from a Hugging Face folder? Slice by slice, each rank what it needs."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megappo.errors import UserError
from megappo.models.shape import ModelShape
from megappo.pp_weights.mapping import Piece, expected_hf_tensors
from megappo.pp_weights.safetensors_file import DTYPE_NAMES
from megappo.pp_weights.verify import NamesDiffer, compare_names

logger = logging.getLogger("megappo")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


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

    def dtypes(self, names: Collection[str]) -> dict[str, torch.dtype]:
        """Name -> dtype. Raises UserError for one that no model here can be held in."""
        known = {text: dtype for dtype, text in DTYPE_NAMES.items()}
        found = {name: self._slice(name).get_dtype() for name in names}
        odd = [f"{name} ({text})" for name, text in found.items() if text not in known]
        if odd:
            raise UserError(f"{self.folder}: {odd[0]} is neither float32, bfloat16 nor float16; convert it to one of them")
        return {name: known[text] for name, text in found.items()}

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """[start, stop) along `dim` (0 or 1) of one tensor, in the folder's dtype."""
        part = slice(start, stop)
        tensor: torch.Tensor = self._slice(name)[part] if dim == 0 else self._slice(name)[:, part]
        return tensor

    def check(self, shape: ModelShape, absent_as_zeros: Collection[str] = ()) -> None:
        """Raise UserError unless the folder holds the model: missing, unexpected and misshapen tensors in one message.

        A head that the model does not use (lm_head of a tied or a value model) may be there: it is skipped, with a note."""
        unused = self.unused(shape)
        if "lm_head.weight" in unused:
            reason = "the model has a value head" if shape.head == "value" else "the embeddings are tied"
            logger.info("%s: lm_head.weight is skipped: %s", self.folder, reason)
        compare_with_config(self.folder, expected_hf_tensors(shape), self.shapes, absent_as_zeros, unused)

    def unused(self, shape: ModelShape) -> set[str]:
        """Tensors that may be there although the model has no place for them."""
        names = {name for name in self._file_of if name.endswith(".rotary_emb.inv_freq")}  # constants that old exports carry
        if "lm_head.weight" in self._file_of and (shape.tied or shape.head == "value"):
            names.add("lm_head.weight")
        return names

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
    compare_with_config(reader.folder, wanted, {n: s for n, s in reader.shapes.items() if n in wanted}, absent_as_zeros)
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


def compare_with_config(
    folder: Path,
    expected: Mapping[str, tuple[int, ...]],
    got: Mapping[str, tuple[int, ...]],
    allow_missing: Collection[str] = (),
    allow_unexpected: Collection[str] = (),
) -> None:
    """Raise UserError, with the three lists, unless a folder's tensors (`got`: name -> shape) are those of its config.json."""
    try:
        compare_names(expected, got, f"{folder}: tensors do not fit config.json", allow_missing, allow_unexpected)
    except NamesDiffer as error:
        raise UserError(f"{error}; copy the folder again from the model's source, or mend config.json") from None
