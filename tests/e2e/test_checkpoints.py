"""Do the commands import and export, and does a run leave checkpoints that are exported and that another run starts from?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megappo.checkpoint.format import read_manifest
from megappo.checkpoint.source import hf_tensors
from megappo.models.families import shape_of
from tests.e2e.command import Ended, Scene
from tests.models import make_model_folder

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

HF = ("rollout.engine=hf", "reference.enabled=false", "algorithm.kl_coef=0", "trainer.batch_size=8", "trainer.validate_every=0")
HF += ("data.validation=null", "run.watchdog_s=60")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "megappo")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_import_and_export_give_back_the_folder_that_transformers_loads(scene: Scene) -> None:
    """tp2 x pp2, in four processes; tokenizer and generation config (with several EOS ids) come along."""
    from transformers import AutoModelForCausalLM

    model, imported, exported = (scene.folder / name for name in ("several_eos", "imported", "exported"))
    shutil.copytree(scene.folder / "model", model)
    (model / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    done = scene.call("import", "several_eos", "imported", "actor.parallel={tp: 2, pp: 2}")
    assert done.stderr.splitlines()[-1].startswith("imported: 0.2 M parameters, held in float32")
    assert "Warning" not in done.stderr
    assert read_manifest(imported)[1].layout["tp"] == 2
    assert len(list(imported.glob("*.distcp"))) == 4
    assert ".imported.import" not in names(scene.folder)
    done = scene.call("export", "imported", "exported")
    assert "Warning" not in done.stderr
    for name in names(model):
        assert (exported / name).read_bytes() == (model / name).read_bytes(), name
    assert names(exported) == names(model)

    loaded, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    source = AutoModelForCausalLM.from_pretrained(model)
    for prompt in ([1, 5, 9], [4], [1, 7, 7, 3, 12]):
        assert torch.equal(loaded(torch.tensor([prompt])).logits, source(torch.tensor([prompt])).logits)


def test_ranks_that_torchrun_started_import_a_reward_model(scene: Scene) -> None:
    make_model_folder(scene.folder / "reward_model", head="value")
    scene.call("import", "reward_model", "rm", "actor.parallel.pp=2", program=TORCHRUN)
    scene.call("export", "rm", "rm_hf", "model.dtype=bfloat16")
    source, exported = (load_file(scene.folder / name / "model.safetensors") for name in ("reward_model", "rm_hf"))
    assert {name: tensor.bfloat16().tolist() for name, tensor in source.items()} == {
        name: tensor.tolist() for name, tensor in exported.items()
    }
    assert json.loads((scene.folder / "rm_hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_import_whose_ranks_fail_says_why_and_leaves_nothing(scene: Scene) -> None:
    model = make_model_folder(scene.folder / "cut_short")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    ended = scene.call("import", "cut_short", "from_cut", "actor.parallel.tp=2", expect=2)
    assert "model.safetensors: cannot be read as safetensors" in ended.message
    assert not any("from_cut" in name for name in names(scene.folder))


@pytest.fixture(scope="module")
def saved_run(scene: Scene) -> Ended:
    """Actor pp2 x vpp2, critic tp2 in the same two ranks; 2 steps, each saved."""
    return scene.run("saves", *HF, "actor.parallel={pp: 2}", "critic.parallel={tp: 2}", "trainer.steps=2")


def test_a_run_leaves_a_checkpoint_of_actor_and_critic_each_step(saved_run: Ended) -> None:
    folder = saved_run.run_dir / "checkpoints"
    assert names(folder) == {"step_000001", "step_000002", "latest"}
    assert (folder / "latest").read_text() == "step_000002\n"
    final = load_file(saved_run.run_dir / "final" / "model.safetensors")
    last = dict(hf_tensors(folder / "step_000002"))
    assert final.keys() == last.keys()
    assert all(torch.equal(final[name], last[name]) for name in final)
    heads = [dict(hf_tensors(folder / f"step_00000{step}" / "critic"))["score.weight"] for step in (1, 2)]
    assert heads[0].abs().max() > 0 and not torch.equal(*heads)
    manifests = [read_manifest(folder / "step_000002" / role)[1] for role in ("actor", "critic")]
    assert [(m.head, m.step, m.layout["pp"], m.layout["tp"]) for m in manifests] == [("lm", 2, 2, 1), ("value", 2, 1, 2)]
    assert all(seconds < 60 for seconds in saved_run.column("timing_s/save"))


def test_transformers_loads_the_exported_critic(scene: Scene, saved_run: Ended) -> None:
    from transformers import AutoModelForSequenceClassification

    critic = saved_run.run_dir / "checkpoints" / "step_000002" / "critic"
    scene.call("export", str(critic), "critic_hf")
    assert shape_of(scene.folder / "critic_hf").head == "value"
    model, info = AutoModelForSequenceClassification.from_pretrained(scene.folder / "critic_hf", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(model.score.weight, dict(hf_tensors(critic))["score.weight"])


def test_a_run_starts_from_the_checkpoints_of_another_under_another_layout(scene: Scene, saved_run: Ended) -> None:
    step = saved_run.run_dir / "checkpoints" / "step_000001"
    layouts = ("actor.parallel={tp: 2, pp: 1, vpp: 1}", "critic.parallel={pp: 2}", "trainer.steps=1", "trainer.save_every=0")
    run = scene.run("goes_on", *HF, *layouts, f"model.path={step}", f"critic.path={step / 'critic'}")
    assert run.column("rollout/logprob_diff_max")[0] <= 1e-3  # the first samples came from the restored weights
    rows = (run.run_dir / "rollouts" / "step_000001.jsonl").read_text().splitlines()
    assert {json.loads(row)["weight_version"] for row in rows} == {1}  # under the version that they were saved with
    assert run.column("weights/version") == [2]
    assert run.column("critic/values_mean")[0] != 0  # a critic that has learnt, not a head of zeros
    first = read_config(run)
    assert first["model"]["tokenizer"] == str(step / "actor" / "hf")
    assert names(run.run_dir / "final") == names(saved_run.run_dir / "final")


def read_config(run: Ended) -> dict[str, Any]:
    import yaml

    loaded: dict[str, Any] = yaml.safe_load((run.run_dir / "config.resolved.yaml").read_text())
    return loaded
