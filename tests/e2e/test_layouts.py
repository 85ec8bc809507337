"""Does a run in another layout keep its promises? Data parallel, tensor parallel, roles with their own layouts; real vLLM."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.e2e.command import Ended, Scene
from tests.e2e.reference import check_greedy, check_log_probs

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.distributed]

PLAIN = ("trainer.validate_every=0", "trainer.save_every=0")


def test_data_parallel_ranks_draw_the_samples_of_one_and_learn_the_same(scene: Scene, main_run: Ended) -> None:
    """main_run is dp1; this one is dp2 on the same pipeline, with the distributed optimizer."""
    optimizers = ("actor.optimizer.distributed=true", "critic.optimizer.distributed=true")
    run = scene.run("dp2", "actor.parallel.dp=2", *optimizers, *PLAIN)
    assert run.rollouts_bytes(1) == main_run.rollouts_bytes(1)
    for key in ("reward/mean", "actor/pg_loss", "actor/entropy", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm"):
        assert run.metrics[0][key] == pytest.approx(main_run.metrics[0][key], rel=1e-3, abs=1e-5), key
    assert run.column("reward/mean") == pytest.approx(main_run.column("reward/mean"), abs=0.05)
    assert max(run.column("rollout/logprob_diff_max")) <= 1e-3


def test_tensor_parallel_stages_hand_their_weights_to_a_tensor_parallel_vllm(scene: Scene) -> None:
    """Actor tp2 x pp2 with sequence parallel, critic dp2 x pp2 x vpp2 in the same four ranks, vLLM over two workers, each of
    which gets the shards of its tp rank, in buckets that cut them."""
    run = scene.run(
        "tp2",
        "actor.parallel={tp: 2, pp: 2, sequence_parallel: true}",
        "critic.parallel={dp: 2, pp: 2, vpp: 2}",
        "rollout.tp=2",
        "pp_weights={gather: pp, mode: bucketed, bucket_bytes: 20000}",
        "trainer.steps=2",
    )
    assert max(run.column("rollout/logprob_diff_max")) <= 1e-3
    for step in (1, 2):
        folder = run.run_dir / "checkpoints" / f"step_{step:06d}" / "actor"
        check_greedy(folder, run.greedy(step), max_new_tokens=6, eos=2)
    assert len(list((run.run_dir / "logs").glob("rank_*.log"))) == 4


@pytest.fixture(scope="module")
def tempered_run(scene: Scene) -> Ended:
    """Actor pp2 x vpp2 and critic tp2 in the same two ranks, temperature 0.6, two samples a prompt, from a model folder whose own
    sampling defaults would change every sample. vLLM reads the published weights where they are."""
    folder = scene.folder / "opinionated"
    shutil.copytree(scene.folder / "model", folder)
    defaults = {"do_sample": True, "top_k": 2, "repetition_penalty": 1.1, "temperature": 0.3, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    layout = (
        "critic.parallel={tp: 2}",
        "rollout.temperature=0.6",
        "rollout.n=2",
        "trainer.batch_size=8",
        "pp_weights.zero_copy=true",
    )
    return scene.run("tempered", "model.path=opinionated", *layout, *PLAIN, "trainer.steps=2")


def test_log_probs_are_those_of_the_sampling_temperature_and_of_no_hidden_default(scene: Scene, tempered_run: Ended) -> None:
    assert max(tempered_run.column("rollout/logprob_diff_max")) <= 1e-3
    check_log_probs(scene.folder / "model", tempered_run.rollouts(1), temperature=0.6)


def test_the_samples_of_one_prompt_differ(tempered_run: Ended) -> None:
    rows = tempered_run.rollouts(1)
    first, second = rows[0::2], rows[1::2]
    assert [row["prompt_ids"] for row in first] == [row["prompt_ids"] for row in second]
    assert sum(a["response_ids"] == b["response_ids"] for a, b in zip(first, second, strict=True)) <= 1


def test_a_critic_with_a_layout_of_its_own_learns(tempered_run: Ended) -> None:
    """Its head starts at zero; after one step the values follow the rewards."""
    assert tempered_run.column("critic/values_mean")[0] == 0
    assert tempered_run.column("critic/values_mean")[1] != 0
    assert min(tempered_run.column("critic/grad_norm")) > 0
