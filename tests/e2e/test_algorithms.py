"""Do the algorithm's options reach a run? All that go together at once, and a run without a critic."""

from __future__ import annotations

import shutil

import pytest
import torch

from megappo.checkpoint.source import hf_tensors
from megappo.observe.metrics import METRICS
from tests.e2e.command import WITH_OPTIONS, Ended, Scene

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SHORT = ("rollout.engine=hf", "rollout.n=2", "trainer.batch_size=4", "trainer.save_every=0", "eval={max_rows: 2, samples: 1}")
SHORT += ("actor.mini_batch_size=4", "critic.mini_batch_size=4", "trainer.validate_every=0")
OPTIONS = (
    *SHORT,
    "actor.parallel={pp: 2, vpp: 2}",
    "algorithm={kl_coef: 0.02, kl_target: 0.1, kl_loss_coef: 0.01, clip_range_high: 0.3, dual_clip: 3.0}",
    "algorithm.importance={bound: masked, floor: 0.5, cap: 2.0}",
    "algorithm.dynamic_sampling_rounds=3",
    "algorithm.loss_aggregation=constant_length",
    "actor.log_probs_from=hidden_states",
    "actor.micro_batch_tokens=300",
    "actor.score_micro_batch_tokens=500",
    "actor.balance=flops",
    "critic={start: fresh, path: sizes, warmup_steps: 1, balance: flops}",
    "trainer.save_every=3",
    "reward={scale: 2.0, divide_by_std: true, clip: 3.0, overlong_buffer: 3, overlong_penalty: 0.5}",
)


@pytest.fixture(scope="module")
def options(scene: Scene) -> Ended:
    (scene.folder / "sizes").mkdir()
    shutil.copy(scene.folder / "model" / "config.json", scene.folder / "sizes")
    return scene.run("options", *OPTIONS)


def test_a_run_with_options_has_the_metrics_of_all_runs_and_theirs(options: Ended) -> None:
    step_2 = options.metrics[1]
    assert step_2.keys() - {"step"} <= METRICS.keys()
    assert step_2.keys() >= WITH_OPTIONS
    assert max(options.column("rollout/logprob_diff_max")) <= 1e-3  # log-probs from hidden states, too


def test_in_the_critics_warm_up_the_actor_stays_as_it_is(options: Ended) -> None:
    first, second, _ = options.metrics
    assert first["actor/param_norm_delta"] == 0 and "actor/pg_loss" not in first
    assert second["actor/param_norm_delta"] != 0 and "actor/pg_loss" in second
    assert all(row["critic/grad_norm"] > 0 for row in options.metrics)


def test_a_critic_that_began_with_random_weights_is_saved_like_any_other(options: Ended) -> None:
    tensors = dict(hf_tensors(options.run_dir / "checkpoints" / "step_000003" / "critic"))
    assert tensors["score.weight"].abs().max() > 0
    actor = dict(hf_tensors(options.run_dir / "checkpoints" / "step_000003" / "actor"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert tensors[name].shape == actor[name].shape and not torch.allclose(tensors[name], actor[name], atol=1e-3)


def test_the_kl_coefficient_follows_its_target(options: Ended) -> None:
    """The policy has hardly moved from the reference, so the coefficient falls by a fifth of its gain a step."""
    first, second, third = options.column("actor/kl_coef")
    assert first == 0.02
    assert second == pytest.approx(first * (1 - 0.1 * 0.2))
    assert third == pytest.approx(second * (1 - 0.1 * 0.2))


def test_dynamic_sampling_learns_from_prompts_whose_responses_differ(options: Ended) -> None:
    for step, row in enumerate(options.metrics, 1):
        samples = options.rollouts(step)
        groups = [samples[i : i + 2] for i in range(0, len(samples), 2)]
        differ = [a["reward"] != b["reward"] for a, b in groups]
        assert row["rollout/prompts_without_signal"] == differ.count(False)
        assert [a["learnt"] and b["learnt"] for a, b in groups] == differ  # none is too many: rounds ask for what is missing
        assert row["rollout/sampling_rounds"] == 3 or sum(differ) == 4


def test_the_kl_in_two_places_is_warned_of(options: Ended) -> None:
    assert "counts in the reward and in the loss; set one of them to 0" in options.stderr


def test_without_a_critic_no_rank_has_one(scene: Scene) -> None:
    run = scene.run(
        "remax",
        *SHORT,
        "actor.parallel={pp: 1, vpp: 1}",
        "offload={parameters: false, gradients: false, optimizer: false}",
        "algorithm={advantages: remax, policy_loss: gspo, kl_coef: 0.0}",
        "trainer={steps: 2, save_every: 2}",
    )
    assert not [key for row in run.metrics for key in row if key.startswith("critic/")]
    assert sorted(path.name for path in (run.run_dir / "checkpoints" / "step_000002").iterdir()) == ["actor"]
    assert run.metrics[0]["actor/grad_norm"] > 0
