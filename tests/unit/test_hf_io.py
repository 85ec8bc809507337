"""Are Hugging Face folders read slice by slice, and refused with a clear line if broken?"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megappo.errors import RunFailed, UserError
from megappo.models.families import shape_of
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.hf_io import HFReader, load_chunk
from megappo.pp_weights.mapping import chunk_pieces
from tests.fake_chunks import chunk_params, make_shape, stamped_hf

INDEX = "model.safetensors.index.json"


def make_folder(
    folder: Path, tied: bool = False, shards: int = 1, extra: tuple[str, ...] = (), drop: tuple[str, ...] = ()
) -> Path:
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 61,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    (folder / "tokenizer.json").write_text("{}")
    tensors = {name: t for name, t in stamped_hf(make_shape(tied=tied)).items() if name not in drop}
    tensors |= {name: torch.ones(61, 8) for name in extra}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"part-{number % shards}.safetensors" for number, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: t for name, t in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_each_rank_loads_its_own_slices_and_padding_becomes_zeros(tmp_path: Path, shards: int, tied: bool) -> None:
    folder = make_folder(tmp_path / "model", tied, shards)
    shape, layout, hf = shape_of(folder), ParallelLayout(4, tp=2, pp=2, vpp=2), stamped_hf(make_shape(tied=tied))
    with HFReader(folder) as reader:
        reader.check(shape)
        for rank in range(layout.world_size):
            own = layout.coordinates(rank)
            for chunk in range(layout.vpp):
                expected = chunk_params(shape, layout, own.tp, own.pp, chunk, hf)
                params = {name: torch.full_like(t, 77.0, dtype=torch.bfloat16) for name, t in expected.items()}
                load_chunk(reader, chunk_pieces(shape, layout, own.tp, own.pp, chunk), params)
                for name, tensor in expected.items():
                    assert torch.equal(params[name], tensor.clamp(min=0).bfloat16()), name  # padding is -1 in `expected`


def test_a_vocabulary_shard_of_nothing_but_padding_is_zeros(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    shape = make_shape(vocab=61)
    layout = ParallelLayout(4, tp=2)
    assert shape.padded_vocab_size(2) == 64
    pieces = chunk_pieces(shape, layout, 1, 0, 0)
    params = {piece.param: torch.ones(piece.param_shape) for piece in pieces}
    with HFReader(folder) as reader:
        load_chunk(reader, pieces, params)
    assert params["embedding.word_embeddings.weight"][29:].abs().sum() == 0
    assert params["embedding.word_embeddings.weight"][:29].min() > 0


def test_an_absent_value_head_becomes_zeros_only_where_the_caller_says_so(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    shape, layout = shape_of(folder, head="value"), ParallelLayout(4)
    pieces = chunk_pieces(shape, layout, 0, 0, 0)
    params = {piece.param: torch.ones(piece.param_shape) for piece in pieces}
    with HFReader(folder) as reader:
        reader.check(shape, absent_as_zeros=("score.weight",))  # lm_head.weight is there and not used
        with pytest.raises(UserError, match=r"missing: score\.weight; unexpected: none; misshapen: none"):
            load_chunk(reader, pieces, params)
        load_chunk(reader, pieces, params, absent_as_zeros=("score.weight",))
    assert params["value_head.weight"].tolist() == [[0.0] * 8]
    assert params["decoder.final_layernorm.weight"].min() > 1


def test_a_chunk_with_other_parameters_than_the_rules_say_is_an_error(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    pieces = chunk_pieces(make_shape(), ParallelLayout(4), 0, 0, 0)
    params = {piece.param: torch.ones(piece.param_shape) for piece in pieces}
    params["decoder.layers.0.self_attention.linear_qkv.weight"] = torch.ones(33, 8)
    params["stray.weight"] = torch.ones(1)
    with HFReader(folder) as reader, pytest.raises(RunFailed) as caught:
        load_chunk(reader, pieces, params)
    assert "unexpected: stray.weight" in str(caught.value)
    assert "linear_qkv.weight (33, 8), expected (32, 8)" in str(caught.value)


@pytest.mark.parametrize(
    "tied, has_head, message",
    [(False, True, None), (False, False, "missing: lm_head.weight"), (True, False, None), (True, True, "skipped")],
)
def test_the_head_is_wanted_if_and_only_if_the_embeddings_are_untied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tied: bool, has_head: bool, message: str | None
) -> None:
    extra = ("lm_head.weight",) if has_head and tied else ()
    drop = () if has_head else ("lm_head.weight",)
    folder = make_folder(tmp_path / "model", tied, extra=extra, drop=drop)
    with HFReader(folder) as reader, caplog.at_level(logging.INFO, "megappo"):
        if message and message.startswith("missing"):
            with pytest.raises(UserError, match=message):
                reader.check(shape_of(folder))
        else:
            reader.check(shape_of(folder))
            assert ("lm_head.weight is skipped: the embeddings are tied" in caplog.text) == (message == "skipped")


def test_names_and_shapes_that_do_not_fit_come_in_one_message(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path / "model", drop=("model.norm.weight",), extra=("stray.weight", "model.layers.2.mlp.up_proj.weight")
    )
    with HFReader(folder) as reader, pytest.raises(UserError) as caught:
        reader.check(shape_of(folder))
    assert "missing: model.norm.weight; unexpected: stray.weight; misshapen: model.layers.2.mlp.up_proj.weight (61, 8)" in str(
        caught.value
    )


def test_broken_folders_are_refused_with_the_file_that_is_at_fault(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "sharded", shards=3)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"lacks part-1\.safetensors, which model\.safetensors\.index\.json names"):
        HFReader(folder)
    folder = make_folder(tmp_path / "moved", shards=3)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "part-0.safetensors"
    index["weight_map"]["lm_head.weight"] = "part-0.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"part-0\.safetensors lacks .*which model\.safetensors\.index\.json places there"):
        HFReader(folder)
    folder = make_folder(tmp_path / "index", shards=3)
    (folder / INDEX).write_text("{}")
    with pytest.raises(UserError, match="not a safetensors index"):
        HFReader(folder)
    folder = make_folder(tmp_path / "cut")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100])
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read as safetensors"):
        HFReader(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        HFReader(folder)
