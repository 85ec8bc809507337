"""Is a checkpoint folder told from others, refused where it is not whole, and never overwritten by mistake?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megappo.checkpoint.convert import export_model, import_model
from megappo.checkpoint.format import Manifest, compact_dtypes, file_sizes, read_manifest, require_replaceable, write_manifest
from megappo.config.check import check_config
from megappo.config.load import load_config
from megappo.errors import UserError
from megappo.models.shape import checkpoint_folder, hf_files
from megappo.pp_weights.folders import move_into_place, start_draft, write_text
from tests.unit.test_check_config import LLAMA


def make_checkpoint(folder: Path, head: Any = "lm", **changes: Any) -> Path:
    """A folder with everything but sensible weights."""
    (folder / "hf").mkdir(parents=True)
    architecture = "LlamaForCausalLM" if head == "lm" else "LlamaForSequenceClassification"
    config = {**LLAMA, "architectures": [architecture]} | ({"num_labels": 1} if head == "value" else {})
    (folder / "hf" / "config.json").write_text(json.dumps(config))
    (folder / "__0_0.distcp").write_bytes(b"weights")
    (folder / ".metadata").write_bytes(b"index")
    given = {"head": head, "step": 7, "dtype": "float32", "layout": {"tp": 1}, "versions": {"megappo": "9.9"}}
    write_manifest(folder, Manifest(**{**given, "files": file_sizes(folder), **changes}))
    return folder


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_manifest(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c", dtype="bfloat16", other_dtypes={"score.weight": "float32"})
    found, manifest = read_manifest(folder)
    assert found == folder
    assert (manifest.head, manifest.step) == ("lm", 7)
    assert (manifest.dtype_of("score.weight"), manifest.dtype_of("model.norm.weight")) == ("float32", "bfloat16")
    assert manifest.files == {".metadata": 5, "__0_0.distcp": 7, "hf/config.json": len(json.dumps(LLAMA))}


def test_dtypes_are_one_and_the_exceptions() -> None:
    assert compact_dtypes({"a": "bfloat16", "b": "float32", "c": "bfloat16"}) == ("bfloat16", {"b": "float32"})


def test_a_step_folder_stands_for_its_actor_and_a_hugging_face_folder_for_itself(tmp_path: Path) -> None:
    for role in ("actor", "critic"):
        make_checkpoint(tmp_path / "step_000100" / role, "lm" if role == "actor" else "value")
    (tmp_path / "hf_folder").mkdir()
    step = tmp_path / "step_000100"
    assert checkpoint_folder(step) == step / "actor"
    assert hf_files(step) == step / "actor" / "hf"
    assert hf_files(step / "critic") == step / "critic" / "hf"
    assert checkpoint_folder(tmp_path / "hf_folder") is None
    assert hf_files(tmp_path / "hf_folder") == tmp_path / "hf_folder"
    assert read_manifest(step)[1].head == "lm"
    latest = tmp_path / "latest"
    latest.write_text("step_000100\n")
    assert read_manifest(latest)[0] == checkpoint_folder(latest) == step / "actor"
    assert hf_files(latest) == step / "actor" / "hf"


def test_folders_that_are_none_or_not_whole_are_refused_in_one_line(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nothing").startswith(f"'{tmp_path}/nothing' is not a folder; give a folder that `megappo import`")
    assert "has no checkpoint.json, so it is no complete checkpoint" in refusal(tmp_path)

    folder = make_checkpoint(tmp_path / "cut")
    (folder / "__0_0.distcp").write_bytes(b"weig")
    assert "cut' is not whole: __0_0.distcp must have 7 bytes, there is 4 bytes; copy the checkpoint again" in refusal(folder)
    (folder / "__0_0.distcp").unlink()
    assert "__0_0.distcp must have 7 bytes, there is no such file" in refusal(folder)

    folder = make_checkpoint(tmp_path / "broken")
    (folder / "checkpoint.json").write_text('{"format": 1, "head": "l')
    assert "broken/checkpoint.json cannot be read" in refusal(folder)
    (folder / "checkpoint.json").write_text('{"format": 1, "head": "lm"}')
    assert "broken/checkpoint.json cannot be read" in refusal(folder)

    folder = make_checkpoint(tmp_path / "newer", format=2)
    assert "has checkpoint format 2, this version reads 1; use the megappo that wrote it (9.9)" in refusal(folder)


def test_only_a_checkpoint_or_an_empty_folder_gives_way_to_a_new_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    (tmp_path / "file").write_text("")
    for free in (tmp_path / "new", tmp_path / "empty", make_checkpoint(tmp_path / "old")):
        require_replaceable(free)
    for taken in ("mine", "file"):
        with pytest.raises(UserError, match=f"{taken}' exists and is no checkpoint, so it is not overwritten"):
            require_replaceable(tmp_path / taken)


def test_a_draft_gets_the_name_whole_and_the_older_folder_goes_only_then(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / "old").write_text("")
    (start_draft(folder) / "left").write_text("")  # by a process that was killed
    draft = start_draft(folder)
    assert [path.name for path in draft.iterdir()] == []
    (draft / "new").write_text("")
    assert [path.name for path in folder.iterdir()] == ["old"]
    move_into_place(draft, folder)
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_pointer_is_replaced_in_one_step(tmp_path: Path) -> None:
    write_text(tmp_path / "latest", "step_000001\n")
    write_text(tmp_path / "latest", "step_000002\n")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"latest": "step_000002\n"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "t.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "c.yaml").write_text(
        "{data: {train: t.jsonl}, trainer: {batch_size: 64}, rollout: {max_prompt_tokens: 64, max_new_tokens: 32, engine: hf}}"
    )
    return tmp_path


def test_a_config_may_name_checkpoints_in_place_of_folders(here: Path) -> None:
    make_checkpoint(here / "step_000003" / "actor")
    make_checkpoint(here / "step_000003" / "critic", "value")
    config = load_config("c.yaml", ["model.path=step_000003", "critic.path=step_000003/critic"])
    plan = check_config(config)
    assert plan.config.model.tokenizer == "step_000003/actor/hf"
    assert [plan.shapes[role].head for role in ("actor", "critic", "reference")] == ["lm", "value", "lm"]


def test_a_config_with_a_damaged_checkpoint_or_a_value_model_as_policy_is_refused(here: Path) -> None:
    damaged = make_checkpoint(here / "damaged")
    (damaged / ".metadata").unlink()
    with pytest.raises(UserError, match=r"^model\.path: 'damaged' is not whole: \.metadata must have 5 bytes.*$"):
        check_config(load_config("c.yaml", ["model.path=damaged"]))
    make_checkpoint(here / "critic", "value")
    with pytest.raises(UserError) as caught:
        check_config(load_config("c.yaml", ["model.path=critic", "critic.path=critic"]))
    (line,) = {line for line in str(caught.value).splitlines() if "reference" not in line}
    assert "has a score head and no vocabulary head, so it cannot generate" in line


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["m", "new", "trainer.steps=3"], "trainer.steps means nothing to `megappo import`; it takes model.dtype"),
        (["m", "new", "model.path=x"], "model.path means nothing to `megappo import`"),
        (["m", "new", "actor.parallel.pp=3"], "actor.parallel.pp=3 does not divide num_layers=8"),
        (["m", "new", "model.dtype=float16"], "model.dtype='float16' is a string; give one of float32, bfloat16"),
        (["m", "m"], "'m' exists and is no checkpoint, so it is not overwritten"),
        (["c", "new"], "'c' is a checkpoint already"),
        (["nothing", "new"], "model.path='nothing' is not a folder"),
    ],
)
def test_an_import_that_cannot_be_is_refused_before_any_work(here: Path, arguments: list[str], message: str) -> None:
    from tests.unit.test_check_config import write_model

    write_model(here / "m")
    make_checkpoint(here / "c")
    with pytest.raises(UserError) as caught:
        import_model(arguments[0], arguments[1], arguments[2:])
    assert str(caught.value).startswith(message)
    assert not (here / "new").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["c", "new", "actor.parallel.tp=2"], "actor.parallel.tp means nothing to `megappo export`; it takes model.dtype"),
        (["c", "new", "model.dtype=int8"], "model.dtype='int8' is not possible; use one of float32, bfloat16, float16"),
        (["c", "taken"], "'taken' exists and is not overwritten"),
        (["taken", "new"], "'taken' has no checkpoint.json"),
    ],
)
def test_an_export_that_cannot_be_is_refused_before_any_work(here: Path, arguments: list[str], message: str) -> None:
    make_checkpoint(here / "c")
    (here / "taken").mkdir()
    (here / "taken" / "file").write_text("")
    with pytest.raises(UserError) as caught:
        export_model(arguments[0], arguments[1], arguments[2:])
    assert str(caught.value).startswith(message)
    assert not (here / "new").exists()


def test_an_export_is_one_process(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(here / "c")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="WORLD_SIZE=2, but an export is one process"):
        export_model("c", "new", [])


def test_refusals_need_no_torch() -> None:
    code = (
        "import sys, megappo.checkpoint.convert, megappo.config.check\n"
        "print([name for name in ('torch', 'megatron') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
