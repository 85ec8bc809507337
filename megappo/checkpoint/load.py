"""How do the weights of a model path get into a model's chunks? `load_weights`; of a checkpoint of any layout: `load_model`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from megappo.checkpoint.format import read_manifest
from megappo.checkpoint.shards import read_shards, sharded_tensors
from megappo.checkpoint.source import ShardFiles, megatron_tensors, require_model
from megappo.models.families import rules_of, shape_of
from megappo.models.gpt import GPTChunk
from megappo.models.shape import checkpoint_folder
from megappo.parallel_state.groups import RoleGroups
from megappo.pp_weights.hf_io import HFReader, load_chunk
from megappo.pp_weights.mapping import TIED_COPY, chunk_pieces
from megappo.pp_weights.naming import get_all_params
from megappo.pp_weights.offload import require_memory

logger = logging.getLogger("megappo")

_VALUE_HEAD, _LM_HEAD = "value_head.weight", "output_layer.weight"


def load_weights(path: str | Path, chunks: Sequence[GPTChunk], groups: RoleGroups) -> None:
    """Fill this rank's chunks from a Hugging Face folder or a checkpoint; every rank of the model calls it.

    Raises UserError as `load_model` does."""
    for chunk in chunks:
        require_memory(chunk.named_parameters(), f"{path} is not loaded")
    if checkpoint_folder(path) is not None:
        load_model(path, chunks, groups)
        return
    shape = chunks[0].shape
    absent = ("score.weight",) if shape_of(path).head == "lm" else ()  # a value head on a language model starts at 0
    with HFReader(path) as reader:
        reader.check(shape, absent_as_zeros=absent)
        for number, chunk in enumerate(chunks):
            pieces = chunk_pieces(shape, groups.layout, groups.coordinates.tp, groups.coordinates.pp, number)
            load_chunk(reader, pieces, get_all_params([chunk])[0], absent_as_zeros=absent)


@torch.no_grad()
def load_model(path: str | Path, chunks: Sequence[GPTChunk], groups: RoleGroups) -> None:
    """Fill this rank's chunks from a checkpoint; every rank of the model calls it. Parameters keep their dtype and place.

    A value model can start from a language model's checkpoint: its head is then 0. Nothing else may be missing, too much or of
    another shape: UserError names them all. Rows of vocabulary padding become 0."""
    folder, manifest = read_manifest(path)
    shape = chunks[0].shape
    starts_at_zero = shape.head == "value" and manifest.head == "lm"
    absent = (_VALUE_HEAD,) if starts_at_zero else ()
    unused = (_LM_HEAD,) if starts_at_zero else ()
    require_model(folder, megatron_tensors(shape, manifest.layout["tp"]), ShardFiles(folder).shapes, absent, unused)
    with groups.active():
        read_shards(folder, sharded_tensors(chunks, without=absent))
    vocabulary = {rule.megatron for rule in (*rules_of(shape), TIED_COPY) if rule.cut == "vocab"}
    for number, chunk in enumerate(chunks):
        params = get_all_params([chunk])[0]
        if starts_at_zero and _VALUE_HEAD in params:
            logger.info("%s: the value head starts at 0, since the checkpoint is a language model's", folder)
            params[_VALUE_HEAD].zero_()
        for piece in chunk_pieces(shape, groups.layout, groups.coordinates.tp, groups.coordinates.pp, number):
            if piece.param in vocabulary:
                params[piece.param][piece.local_stop :].zero_()
