"""Do `megappo weights explain` and `megappo weights verify` say what is so?"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megappo.cli import main
from megappo.errors import UserError
from megappo.models.shape import ModelShape
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.explain import explain_lines
from megappo.pp_weights.plan import TransferPlan, build_plan
from megappo.trainer.weights_command import model_of_source
from tests.fake_chunks import make_shape, stamped_hf
from tests.unit.test_check_config import write_model

SHAPE = make_shape(layers=4, kv_heads=4, vocab=128)


def plan_of(shape: ModelShape, layout: ParallelLayout, **options: object) -> TransferPlan:
    return build_plan(shape, layout, dict.fromkeys(stamped_hf(shape), "bfloat16"), **options)  # type: ignore[arg-type]


def test_the_owners_of_a_qkv_matrix_and_its_offset_are_named() -> None:
    lines = list(explain_lines(plan_of(SHAPE, ParallelLayout(4, tp=2, pp=2, vpp=2)), "shared_memory", 1))
    embedding, first_norm = 2 * 128 * 8, 2 * 8
    assert (
        f"  model.layers.0.self_attn.q_proj.weight bfloat16 16x8: 0 @ {embedding + first_norm}, 256: rank 0 [0:8], rank 1 [8:16]"
        in lines
    )
    assert any(
        "model.layers.2.mlp.down_proj.weight" in line and line.endswith("rank 0 [:, 0:6], rank 1 [:, 6:12]") for line in lines
    )
    assert any("model.layers.1.input_layernorm.weight" in line and line.endswith("rank 2 [0:8]") for line in lines)
    assert "   3   1  1  0  1 | 3+L " in "\n".join(lines)


@pytest.mark.parametrize("gather", ["full", "pp"])
def test_the_bytes_that_ranks_are_said_to_receive_add_up(gather: str) -> None:
    plan = plan_of(SHAPE, ParallelLayout(4, tp=2, pp=2), gather=gather)
    text = "\n".join(explain_lines(plan, "collective", 1))
    unit = {"bytes": 1, "KiB": 1024}
    sent = [(int(a), int(b), float(n) * unit[u]) for a, b, n, u in re.findall(r"rank (\d) -> rank (\d): ([\d.]+) (\w+)", text)]
    to_first = sum(count for _, receiver, count in sent if receiver == 0)
    held = sum(entry.num_bytes for bucket in plan.targets[0].buckets for entry in bucket.entries)
    own = sum(plan.bytes_of(write) for write in plan.writes[0][0])
    assert to_first == pytest.approx(held - own, rel=0.01)
    assert f"to {'rank 0, rank 1' if gather == 'pp' else 'rank 0'}" in text


def test_buckets_and_cut_tensors_show_with_their_memory() -> None:
    plan = plan_of(SHAPE, ParallelLayout(4, pp=2), bucket_bytes=1024)
    text = "\n".join(explain_lines(plan, "shared_memory", 2))
    assert f"{plan.num_buckets} buckets" in text
    assert "rank 0: 2 buffers of 1.00 KiB = 2.00 KiB (host memory)" in text
    assert "model.embed_tokens.weight bfloat16 128x8 rows 0:64: 0 @ 0, 1024: rank 0 [0:64]" in text
    assert "model.embed_tokens.weight bfloat16 128x8 rows 64:128: 1 @ 0, 1024: rank 0 [64:128]" in text


def test_explaining_needs_neither_torch_nor_ranks(tmp_path: Path) -> None:
    write_model(tmp_path / "m")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "1"}\n')
    (tmp_path / "c.yaml").write_text(
        "{model: {path: m}, data: {train: rows.jsonl}, rollout: {engine: hf, max_prompt_tokens: 16, max_new_tokens: 8}}"
    )
    code = (
        "import sys; from megappo.cli import main; code = main(sys.argv[1:]);"
        "print({'torch', 'megatron', 'vllm', 'transformers', 'numpy'} & set(sys.modules), code, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "weights", "explain", "c.yaml", "actor.parallel.pp=2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.strip().endswith("set() 0"), done.stderr
    assert "layout: pp2, 2 ranks" in done.stdout
    assert main(["weights", "explain", str(tmp_path / "c.yaml"), "actor.parallel.pp=3"]) == 2


@pytest.fixture
def copy_of_llama(llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama_folder, tmp_path / "copy"))


def test_equal_models_verify_and_every_difference_is_named(
    llama_folder: Path, copy_of_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["weights", "verify", str(llama_folder), str(copy_of_llama)]
    assert main(command) == 0
    tensors = load_file(copy_of_llama / "model.safetensors")
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert capsys.readouterr().out == f"equal: {len(tensors)} tensors, {size} bytes\n"
    tensors["model.layers.3.mlp.up_proj.weight"][0, :2] += 0.5
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    save_file(tensors, copy_of_llama / "model.safetensors", metadata={"format": "pt"})
    assert main(command) == 1
    up, norm, verdict = capsys.readouterr().out.splitlines()
    assert up == "model.layers.3.mlp.up_proj.weight: 2 of 6144 elements differ, by 0.5 at most"
    assert norm == "model.norm.weight: float32 (64,) and bfloat16 (64,)"
    assert verdict == f"2 of {len(tensors)} tensors differ"


def test_models_of_different_kinds_and_folders_without_a_model_are_refused(
    llama_folder: Path, tied_llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["weights", "verify", str(llama_folder), str(tied_llama_folder)]) == 2
    assert "lm_head.weight meets nothing; compare models of one shape" in capsys.readouterr().err
    assert main(["weights", "verify", str(llama_folder), str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err


def test_a_run_stands_for_its_final_weights_or_its_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.resolved.yaml").write_text("{}")
    with pytest.raises(UserError, match="is a run folder without"):
        model_of_source(str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").write_text("step_000002")
    assert model_of_source(str(tmp_path)) == tmp_path / "checkpoints" / "latest"
    (tmp_path / "final").mkdir()
    assert model_of_source(str(tmp_path)) == tmp_path / "final"
