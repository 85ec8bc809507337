"""Are Hugging Face folders written whole or not at all, tensor by tensor, with everything that belongs to the model?"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megappo.errors import RunFailed, UserError
from megappo.models.families import shape_of
from megappo.pp_weights.folders import start_draft
from megappo.pp_weights.hf_io import INDEX, HFReader
from megappo.pp_weights.hf_writer import write_hf_folder
from megappo.pp_weights.mapping import expected_hf_tensors
from megappo.pp_weights.safetensors_file import SafetensorsFile
from tests.fake_chunks import make_shape, stamped_hf
from tests.unit.test_hf_io import make_folder

Named = Iterable[tuple[str, torch.Tensor]]


def write(target: Path, tensors: Mapping[str, torch.Tensor], source: Path, given: Named | None = None, **options: Any) -> Path:
    """The tensors, or what is `given` in their place."""
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    return write_hf_folder(target, tensors.items() if given is None else given, dtypes, source, **options)


def test_a_file_has_the_bytes_that_safetensors_writes(tmp_path: Path) -> None:
    tensors = {
        "b.weight": torch.randn(3, 5),
        "a.weight": torch.randn(7, 1),
        "odd": torch.randn(3).bfloat16(),  # 6 bytes: a float32 behind it would not be aligned
        "ä": torch.randn(2, 2),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    with SafetensorsFile(tmp_path / "ours", {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}) as file:
        for name in ("odd", "ä", "empty", "a.weight", "b.weight"):
            file.write(name, tensors[name])
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 2000])
def test_a_written_folder_holds_the_tensors_config_and_tokenizer(tmp_path: Path, max_shard_bytes: int) -> None:
    source, hf = make_folder(tmp_path / "source"), stamped_hf(make_shape())
    target = write(tmp_path / "new" / "final", hf, source, max_shard_bytes=max_shard_bytes)
    with HFReader(target) as reader:
        reader.check(shape_of(target))
        assert all(torch.equal(reader.read(name), tensor) for name, tensor in hf.items())
    assert json.loads((target / "config.json").read_text())["dtype"] == "float32"
    assert json.loads((target / "generation_config.json").read_text())["eos_token_id"] == [2, 3]
    assert (target / "tokenizer.json").exists()
    assert (target / INDEX).exists() == (max_shard_bytes == 2000)
    for file in target.glob("*.safetensors"):
        assert sum(t.nbytes for t in load_file(file).values()) <= max_shard_bytes
    if max_shard_bytes == 2000:
        assert json.loads((target / INDEX).read_text())["metadata"]["total_size"] == sum(t.nbytes for t in hf.values())
    assert [path.name for path in target.parent.iterdir()] == ["final"]


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    source, hf = make_folder(tmp_path / "source"), stamped_hf(make_shape())
    alive: set[str] = set()
    most = 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for name, tensor in hf.items():
            made = tensor.clone()
            alive.add(name)
            weakref.finalize(made, alive.discard, name)
            most = max(most, len(alive))
            yield name, made
            del made

    write(tmp_path / "final", hf, source, given=stream(), max_shard_bytes=2000)
    assert most <= 2  # the one that is made, and the one that the loop has not let go of


def test_a_tensor_is_written_in_the_dtype_that_was_asked_for(tmp_path: Path) -> None:
    source, hf = make_folder(tmp_path / "source"), stamped_hf(make_shape())
    dtypes = dict.fromkeys(hf, torch.float16) | {"model.norm.weight": torch.float32}
    target = write_hf_folder(tmp_path / "final", hf.items(), dtypes, source)
    written = load_file(target / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items()} == dtypes
    assert torch.equal(written["lm_head.weight"], hf["lm_head.weight"].half())
    assert json.loads((target / "config.json").read_text())["dtype"] == "float16"  # what most elements have


def test_a_config_that_is_right_already_is_copied_byte_for_byte(tmp_path: Path) -> None:
    source, hf = make_folder(tmp_path / "source"), stamped_hf(make_shape())
    target = write(tmp_path / "final", {name: tensor.bfloat16() for name, tensor in hf.items()}, source)
    assert (target / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_transformers_loads_what_was_written_from_views_of_one_buffer(tmp_path: Path, tied_llama_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    with HFReader(tied_llama_folder) as reader:
        flat = torch.cat([reader.read(name).reshape(-1) for name in reader.names])
        sizes = [torch.Size(shape).numel() for shape in reader.shapes.values()]
        views = {n: part.view(s) for (n, s), part in zip(reader.shapes.items(), flat.split(sizes), strict=True)}
    views["lm_head.weight"] = views["model.embed_tokens.weight"]  # a tied head is left out
    target = write(tmp_path / "final", views, tied_llama_folder)
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    source = AutoModelForCausalLM.from_pretrained(tied_llama_folder)
    ids = torch.tensor([[1, 5, 9, 13]])
    assert torch.equal(model(ids).logits, source(ids).logits)


def test_an_incomplete_or_failed_write_leaves_the_old_folder_as_it_was(tmp_path: Path) -> None:
    source, hf = make_folder(tmp_path / "source"), stamped_hf(make_shape())
    target = write(tmp_path / "final", hf, source)
    before = (target / "model.safetensors").read_bytes()
    changed = {name: tensor + 1 for name, tensor in hf.items()}
    without = {name: tensor for name, tensor in changed.items() if name != "model.norm.weight"}
    with pytest.raises(UserError, match=r"missing: model\.norm\.weight"):
        write(target, without, source)
    with pytest.raises(UserError, match=r"missing: model\.norm\.weight"):
        write(target, changed, source, given=without.items())

    def breaks_half_way() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(changed.items())[:5]
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write(target, changed, source, given=breaks_half_way())
    with pytest.raises(UserError, match="given twice"):
        write(target, changed, source, given=[*changed.items(), *changed.items()])
    with pytest.raises(UserError, match="stray is not among the tensors that were announced"):
        write(target, changed, source, given=[("stray", torch.ones(1))])
    assert (target / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "source"]
    write(target, changed, source)
    assert torch.equal(load_file(target / "model.safetensors")["model.norm.weight"], hf["model.norm.weight"] + 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "source"]


def test_a_folder_that_the_disk_has_no_room_for_is_not_begun(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"big takes 4611686018427387904 bytes and \d+ are free on its disk; nothing was written"):
        start_draft(tmp_path / "big", 1 << 62)
    assert list(tmp_path.iterdir()) == []


def test_a_value_model_is_one_that_transformers_loads_as_a_classifier_of_one_label(tmp_path: Path, llama_folder: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    with HFReader(llama_folder) as reader:
        tensors = {name: reader.read(name) for name in reader.names if name != "lm_head.weight"}
    tensors["score.weight"] = torch.randn(1, 64)
    target = write(tmp_path / "critic", tensors, llama_folder)
    assert set(load_file(target / "model.safetensors")) == set(expected_hf_tensors(shape_of(target)))
    assert shape_of(target).head == "value"
    model, info = AutoModelForSequenceClassification.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.config.num_labels == 1
    hidden = model.model(torch.tensor([[1, 5, 9]])).last_hidden_state[0, -1]
    assert torch.allclose(model(torch.tensor([[1, 5, 9]])).logits[0], tensors["score.weight"] @ hidden, atol=1e-5)
