"""Is a config that cannot run refused before anything starts, with the fix in the message?"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megappo.config.check import Plan, check_config, joined_world_size
from megappo.config.load import load_config
from megappo.errors import UserError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 8,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 100,
    "max_position_embeddings": 128,
}


def write_model(folder: Path, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a model, data and a config of 16 prompts x 4 samples in mini-batches of 32."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "m")
    (tmp_path / "t.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    (tmp_path / "c.yaml").write_text(
        "{model: {path: m}, data: {train: t.jsonl}, trainer: {batch_size: 16}, sft: {output: o, batch_size: 16},"
        "rollout: {n: 4, max_prompt_tokens: 64, max_new_tokens: 32, engine: hf},"
        "actor: {mini_batch_size: 32}, critic: {mini_batch_size: 32}}"
    )
    return tmp_path


def check(*overrides: str, world_size: int | None = None, command: Any = "train", local: int | None = None) -> Plan:
    return check_config(load_config("c.yaml", overrides, command), world_size, command, local)


def problems(*overrides: str, world_size: int | None = None, command: Any = "train", local: int | None = None) -> list[str]:
    with pytest.raises(UserError) as caught:
        check(*overrides, world_size=world_size, command=command, local=local)
    return str(caught.value).splitlines()


@pytest.mark.usefixtures("here")
class TestLayouts:
    def test_a_plan_has_the_sizes_and_layouts_of_all_roles(self) -> None:
        plan = check("actor.parallel.pp=2", "actor.parallel.vpp=2", "critic.parallel.tp=2")
        assert plan.world_size == 2
        assert [str(plan.layouts[role]) for role in ("actor", "critic", "reference")] == ["pp2 x vpp2", "tp2", "pp2 x vpp2"]
        assert plan.shapes["critic"].head == "value"
        assert plan.shapes["actor"].num_layers == 8

    def test_what_does_not_divide_is_refused_once_for_a_shared_layout(self) -> None:
        (error,) = problems("actor.parallel.pp=3")
        assert error.startswith("actor.parallel.pp=3 does not divide num_layers=8; use 1, 2, 4 or 8")
        (error,) = problems("actor.parallel.tp=3")
        assert error == (
            "actor.parallel.tp=3 does not fit num_attention_heads=8 and num_key_value_heads=4 and intermediate_size=512; "
            "use 1, 2, 4 or 8"
        )

    def test_fewer_kv_heads_than_tensor_parallel_ranks_are_accepted(self) -> None:
        assert check("actor.parallel.tp=8").layouts["actor"].tp == 8

    def test_an_uneven_split_reaches_the_layout_by_each_of_its_keys(self) -> None:
        first = "actor.parallel.num_layers_in_first_pipeline_stage=5"
        last = "actor.parallel.num_layers_in_last_pipeline_stage=3"
        text = "actor.parallel.pipeline_model_parallel_layout=Et*5|t*3L"
        stages = "actor.parallel.layers_per_stage=[5, 3]"
        for keys in ([first], [last], [first, last], [text], [stages]):
            assert check("actor.parallel.pp=2", *keys).layouts["actor"].layers(1) == range(5, 8)
        ends = [f"actor.parallel.account_for_{end}_in_pipeline_split=true" for end in ("embedding", "loss")]
        assert check("actor.parallel.pp=2", "critic.parallel.pp=2", *ends).layouts["actor"].layers(0) == range(4)
        assert check("actor.parallel.pp=5", "data.train=t.jsonl", *ends).layouts["actor"].layers(0) == range(1)

    def test_two_ways_of_splitting_are_refused_once_for_a_shared_layout(self) -> None:
        (error,) = problems(
            "actor.parallel.pp=2", "actor.parallel.layers_per_stage=[4, 4]", "actor.parallel.num_layers_in_first_pipeline_stage=4"
        )
        assert error == (
            "actor.parallel.layers_per_stage=[4, 4] and actor.parallel.num_layers_in_first_pipeline_stage=4 are 2 ways of "
            "splitting the same layers; keep one of them"
        )

    def test_a_layout_of_the_critics_own_is_refused_under_its_own_key(self) -> None:
        (error,) = problems("critic.parallel.pp=3", "actor.parallel.pp=2")
        assert error.startswith("critic.parallel.pp=3 does not divide num_layers=8")

    @pytest.mark.parametrize("axis, name", [("cp", "context"), ("ep", "expert")])
    def test_what_comes_later_is_refused(self, axis: str, name: str) -> None:
        assert problems(f"actor.parallel.{axis}=2") == [
            f"actor.parallel.{axis}=2: {name} parallelism is not supported yet; set it to 1"
        ]

    def test_sequence_parallel_needs_tensor_parallel(self) -> None:
        (error,) = problems("actor.parallel.sequence_parallel=true")
        assert "needs actor.parallel.tp of 2 or more" in error
        check("actor.parallel.sequence_parallel=true", "actor.parallel.tp=2")

    def test_all_roles_need_the_same_number_of_ranks(self) -> None:
        (error,) = problems("actor.parallel.pp=4", "critic.parallel.tp=2")
        assert error == (
            "critic.parallel needs tp x cp x pp x dp = 2 x 1 x 1 x 1 = 2 ranks, actor.parallel needs "
            "tp x cp x pp x dp = 1 x 1 x 4 x 1 = 4 ranks, and all models share the same ranks; set critic.parallel.dp=2"
        )

    def test_a_launchers_world_must_be_the_layouts(self) -> None:
        (error,) = problems("actor.parallel.pp=2", world_size=4)
        assert error == (
            "WORLD_SIZE=4, but actor.parallel needs tp x cp x pp x dp = 1 x 1 x 2 x 1 = 2 ranks; start 2 ranks, "
            "or set actor.parallel.dp=2"
        )
        (error,) = problems("actor.parallel.tp=2", world_size=1)
        assert error.endswith("choose actor.parallel.tp, cp and pp so that their product (now 2) divides 1")
        assert check("actor.parallel.pp=2", world_size=2).world_size == 2

    def test_an_evaluation_has_no_layout_and_is_one_process(self) -> None:
        data = ("data.validation=t.jsonl", "data.train=not/read.jsonl", "actor.parallel.pp=5", "trainer.batch_size=7")
        assert dict(check(*data, command="eval").layouts) == {}
        (error,) = problems(*data, command="eval", world_size=2)
        assert error == "WORLD_SIZE=2, but an evaluation is one process; start `megappo eval` without torchrun"

    def test_torchrun_as_the_launcher_needs_its_variables(self) -> None:
        (error,) = problems("run.launcher=torchrun")
        assert error.startswith("run.launcher='torchrun', but RANK and WORLD_SIZE are not set")

    def test_the_world_is_joined_only_where_a_launcher_has_started_it(self) -> None:
        environment = {"RANK": "0", "WORLD_SIZE": "4"}
        assert joined_world_size(load_config("c.yaml"), environment) == 4
        assert joined_world_size(load_config("c.yaml"), {"WORLD_SIZE": "4"}) is None
        assert joined_world_size(load_config("c.yaml", ["run.launcher=local"]), environment) is None

    def test_a_degree_below_one_is_refused(self) -> None:
        assert problems("actor.parallel.dp=0") == ["actor.parallel.dp=0 must be at least 1"]
        assert problems("actor.parallel.tp=0") == ["actor.parallel.tp=0 must be at least 1"]


SAMPLES = "trainer.batch_size=16 x rollout.n=4 = 64 samples"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "dp, mini, micro, message",
    [
        (1, 32, 8, None),
        (1, 64, 64, None),
        (1, 1, 1, None),
        (1, 64, 7, None),  # a short last micro-batch is no fault
        (2, 32, 16, None),
        (4, 4, 1, None),
        (64, 64, 1, None),
        (1, 48, 8, f"actor.mini_batch_size=48 does not divide {SAMPLES}; use 32 or 64"),
        (1, 3, 1, f"actor.mini_batch_size=3 does not divide {SAMPLES}; use 2 or 4"),
        (1, 128, 8, f"actor.mini_batch_size=128 is more than {SAMPLES}; use 64"),
        (1, 0, 8, "actor.mini_batch_size=0 must be at least 1"),
        (1, 32, 0, "actor.micro_batch_size=0 must be at least 1"),
        (1, 16, 32, "actor.micro_batch_size=32 is more than a rank's part of actor.mini_batch_size=16 (dp=1: 16 samples)"),
        (2, 32, 32, "actor.micro_batch_size=32 is more than a rank's part of actor.mini_batch_size=32 (dp=2: 16 samples)"),
        (2, 1, 1, "actor.mini_batch_size=1 is not a multiple of actor.parallel.dp=2; use 2"),
        (8, 4, 1, "actor.mini_batch_size=4 is not a multiple of actor.parallel.dp=8; use 8"),
        (3, 32, 8, f"{SAMPLES} cannot be split over actor.parallel.dp=3; make trainer.batch_size 15 or 18"),
        (128, 32, 8, f"{SAMPLES} cannot be split over actor.parallel.dp=128; make trainer.batch_size 128"),
    ],
)  # fmt: skip
def test_batches_are_accepted_or_refused_with_the_nearest_value(dp: int, mini: int, micro: int, message: str | None) -> None:
    overrides = [f"actor.parallel.dp={dp}", f"actor.mini_batch_size={mini}", f"actor.micro_batch_size={micro}"]
    overrides += ["critic.mini_batch_size=64", "critic.micro_batch_size=1"]
    if message is None:
        check(*overrides)
    else:
        assert problems(*overrides)[0].startswith(message)


@pytest.mark.usefixtures("here")
class TestValues:
    @pytest.mark.parametrize("pp, vpp", [(4, 2), (2, 4)])
    def test_any_number_of_samples_fits_an_interleaved_schedule(self, pp: int, vpp: int) -> None:
        layout = [f"actor.parallel.pp={pp}", f"actor.parallel.vpp={vpp}"]
        for prompts in range(1, 13):
            sizes = [f"{role}.mini_batch_size={prompts}" for role in ("actor", "critic")]
            micro = [f"{role}.micro_batch_size=1" for role in ("actor", "critic")]
            check(*layout, *sizes, *micro, f"trainer.batch_size={prompts}", "rollout.n=1")

    def test_the_critics_batches_are_checked_too(self) -> None:
        (error,) = problems("critic.mini_batch_size=48")
        assert error.startswith("critic.mini_batch_size=48 does not divide")

    def test_a_token_budget_must_hold_the_longest_sample(self) -> None:
        (error,) = problems("actor.micro_batch_tokens=95")
        assert error.startswith("actor.micro_batch_tokens=95 does not hold one sample of up to 96 tokens")
        check("actor.micro_batch_tokens=96", "actor.micro_batch_size=1000")

    def test_prompt_and_response_must_fit_the_positions(self) -> None:
        check("rollout.max_prompt_tokens=96")
        (error,) = problems("rollout.max_prompt_tokens=97")
        assert error == (
            "rollout.max_prompt_tokens=97 + rollout.max_new_tokens=32 = 129 exceeds the model's max_position_embeddings=128; "
            "lower them by 1 together"
        )

    @pytest.mark.parametrize("temperature", ["0", "-1", "0.0"])
    def test_greedy_sampling_is_refused_for_training(self, temperature: str) -> None:
        (error,) = problems(f"rollout.temperature={temperature}")
        assert "it is greedy" in error

    @pytest.mark.parametrize("override", ["rollout.top_p=0.9", "rollout.top_k=20"])
    def test_filtered_sampling_is_warned_of(self, override: str, monkeypatch: pytest.MonkeyPatch) -> None:
        warnings: list[str] = []
        monkeypatch.setattr(logging.getLogger("megappo"), "warning", lambda text, *values: warnings.append(text % values))
        check()
        assert warnings == []
        check(override)
        (warning,) = warnings
        assert warning.startswith(f"{override}: the engine samples from a part of the vocabulary")

    @pytest.mark.parametrize(
        "override",
        [
            "run.watchdog_s=0",
            "run.threads_per_rank=0",
            "run.name=a/b",
            "run.name=..",
            "actor.optimizer.lr=0",
            "critic.optimizer.lr=-1",
            "actor.optimizer.betas=[1.0, 0.9]",
            "actor.optimizer.min_lr_ratio=2",
            "actor.optimizer.decay_steps=0",
            "critic.epochs=0",
            "critic.value_clip_range=0",
            "algorithm.gamma=1.1",
            "algorithm.gae_lambda=-0.1",
            "algorithm.clip_range=0",
            "algorithm.kl_coef=-1",
            "algorithm.kl_loss_coef=-0.1",
            "algorithm.kl_target=0",
            "algorithm.kl_gain=0",
            "algorithm.clip_range_high=0",
            "algorithm.dual_clip=1.0",
            "algorithm.loss_length=0",
            "algorithm.importance.cap=0",
            "algorithm.importance.floor=-1",
            "algorithm.dynamic_sampling_rounds=-1",
            "critic.warmup_steps=-1",
            "actor.micro_batch_tokens=0",
            "actor.score_micro_batch_tokens=0",
            "reward.scale=0",
            "reward.clip=0",
            "reward.overlong_buffer=-1",
            "reward.overlong_penalty=-1",
            "trainer.max_skips=0",
            "rollout.top_p=0",
            "rollout.top_k=0",
            "rollout.n=0",
            "rollout.tp=0",
            "rollout.max_new_tokens=0",
            "rollout.logprob_tolerance=0",
            "trainer.steps=0",
            "trainer.save_every=-1",
            "eval.max_rows=0",
            "pp_weights.verify_every=-1",
            "pp_weights.alignment_bytes=8",
            "pp_weights.alignment_bytes=48",
        ],
    )
    def test_a_value_out_of_range_is_refused_by_its_key(self, override: str) -> None:
        key = override.partition("=")[0]
        assert any(error.startswith(key) for error in problems(override))

    def test_a_warm_up_ends_before_the_decay_but_the_run_may_end_within_it(self) -> None:
        check("actor.optimizer.warmup_steps=10", "trainer.steps=3")
        check("actor.optimizer.warmup_steps=10", "actor.optimizer.decay_steps=11")
        (error,) = problems("actor.optimizer.warmup_steps=10", "actor.optimizer.decay_steps=10")
        assert error.startswith("actor.optimizer.warmup_steps=10 must be less than actor.optimizer.decay_steps=10")

    def test_a_kl_penalty_without_its_reference_is_refused(self) -> None:
        (error,) = problems("algorithm.kl_coef=0.1", "reference.enabled=false")
        assert error.startswith("algorithm.kl_coef=0.1 needs the reference")

    @pytest.mark.parametrize(
        "overrides, message",
        [
            (["algorithm.kl_loss_coef=0.1", "reference.enabled=false"], "algorithm.kl_loss_coef=0.1 needs the reference"),
            (["algorithm.kl_target=0.1"], "algorithm.kl_target=0.1 adapts algorithm.kl_coef, which is 0 and stays 0"),
            (["algorithm.advantages=grpo", "rollout.n=1"], "algorithm.advantages='grpo' compares responses to one prompt"),
            (["algorithm.advantages=rloo", "rollout.n=1"], "algorithm.advantages='rloo' compares responses to one prompt"),
            (["algorithm.dynamic_sampling_rounds=2", "rollout.n=1"], "algorithm.dynamic_sampling_rounds=2 looks for responses"),
            (
                ["algorithm.policy_loss=gspo", "algorithm.dual_clip=3"],
                "algorithm.dual_clip=3.0 bounds the loss of policy_loss=ppo",
            ),
            (["algorithm.loss_length=8"], "algorithm.loss_length=8 goes with algorithm.loss_aggregation=constant_length"),
            (["algorithm.importance.floor=0.5"], "algorithm.importance.floor=0.5 goes with algorithm.importance.bound=masked"),
            (["algorithm.importance={bound: masked, floor: 3}"], "algorithm.importance.floor=3.0 is above"),
            (
                ["algorithm.advantages=grpo", "critic.warmup_steps=2"],
                "critic.warmup_steps=2, but algorithm.advantages='grpo' has no",
            ),
            (["reward.overlong_buffer=33"], "reward.overlong_buffer=33 is longer than a response, rollout.max_new_tokens=32"),
            (
                ["actor.score_micro_batch_tokens=95"],
                "actor.score_micro_batch_tokens=95 does not hold one sample of up to 96 tokens",
            ),
        ],
    )
    def test_keys_of_the_algorithm_that_do_not_fit_together(self, overrides: list[str], message: str) -> None:
        smaller = ["trainer.batch_size=64"] if "rollout.n=1" in overrides else []
        (error,) = problems(*overrides, *smaller)
        assert error.startswith(message)

    @pytest.mark.parametrize(
        "overrides, message",
        [
            (
                ["algorithm.kl_coef=0.1", "algorithm.kl_loss_coef=0.2"],
                "algorithm.kl_coef=0.1 and algorithm.kl_loss_coef=0.2: the KL",
            ),
            (["algorithm.kl_loss_coef=0.2", "algorithm.kl_loss=k1"], "algorithm.kl_loss=k1 has a gradient of mean 0"),
            (
                ["algorithm.policy_loss=gspo", "algorithm.loss_aggregation=token_mean"],
                "algorithm.loss_aggregation=token_mean: GSPO's",
            ),
        ],
    )
    def test_what_is_seldom_meant_is_warned_of(self, overrides: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
        warnings: list[str] = []
        monkeypatch.setattr(logging.getLogger("megappo"), "warning", lambda text, *values: warnings.append(text % values))
        check(*overrides[:1])
        assert warnings == []
        check(*overrides)
        (warning,) = warnings
        assert warning.startswith(message)

    def test_without_gae_nothing_is_asked_of_a_critic(self, here: Path) -> None:
        plan = check("algorithm.advantages=grpo", "critic.path=nowhere", "critic.parallel.tp=3", "critic.mini_batch_size=7")
        assert sorted(plan.layouts) == ["actor", "reference"]
        assert "critic.path='nowhere'" in problems("critic.path=nowhere")[0].replace('"', "'")

    def test_a_fresh_critic_needs_sizes_but_no_weights(self, here: Path) -> None:
        write_model(here / "bare")
        (here / "bare" / "model.safetensors").unlink()
        (error,) = problems("critic.path=bare")
        assert error.startswith("critic.path='bare' has no .safetensors file")
        check("critic.path=bare", "critic.start=fresh")

    def test_defaults_that_follow_from_other_keys_of_the_algorithm(self) -> None:
        algorithm = check("algorithm.policy_loss=gspo").config.algorithm
        assert (algorithm.loss_aggregation, algorithm.loss_length) == ("seq_mean_token_mean", None)
        algorithm = check("algorithm.loss_aggregation=constant_length").config.algorithm
        assert algorithm.loss_length == 32  # rollout.max_new_tokens
        assert check("algorithm.kl_loss_coef=0.1").config.reference.enabled
        assert check("actor.micro_batch_tokens=100").config.actor.score_micro_batch_tokens == 100

    def test_accuracy_goals_of_the_warm_start_need_an_evaluation(self, here: Path) -> None:
        (error,) = problems("sft.stop_at_accuracy=0.4", command="sft")
        assert error.startswith("sft.evaluate_every=0 never measures")
        check("sft.stop_at_accuracy=0.4", "sft.evaluate_every=5", "data.validation=t.jsonl", command="sft")

    def test_the_warm_start_does_not_look_at_what_it_does_not_use(self) -> None:
        check("critic.path=nowhere", "critic.parallel.tp=3", "reward.function=nothing", "trainer.batch_size=7", command="sft")
        (error,) = problems(
            "reward.function=nothing", "sft.evaluate_every=5", "data.validation=t.jsonl", "critic.path=nowhere", command="sft"
        )
        assert error.startswith("reward.function='nothing'")
        (error,) = problems("sft.batch_size=7", "actor.parallel.dp=2", command="sft")
        assert error == "sft.batch_size=7 is not a multiple of actor.parallel.dp=2; use 6 or 8"


@pytest.mark.usefixtures("here")
class TestRollout:
    def test_the_engines_degree_must_fit_the_heads(self) -> None:
        four = ["actor.parallel.pp=4", "rollout.engine=vllm"]
        for tp in (1, 2, 4):
            check(*four, f"rollout.tp={tp}")
        (error,) = problems(*four, "rollout.tp=3")
        assert error == ("rollout.tp=3 must divide num_attention_heads=8 and fit num_key_value_heads=4; use 1, 2, 4 or 8")

    def test_only_vllm_is_tensor_parallel(self) -> None:
        (error,) = problems("actor.parallel.pp=2", "rollout.tp=2")
        assert error.startswith("rollout.tp=2 is not possible with rollout.engine='hf'")

    def test_shards_go_to_an_engine_that_is_cut_alike(self, here: Path) -> None:
        shards = "pp_weights.gather='pp' hands over actor.parallel.tp=2 shards of each tensor"
        two = ["pp_weights.gather=pp", "actor.parallel.tp=2", "rollout.max_new_tokens=32"]
        assert problems(*two) == [f"{shards}, and rollout.engine='hf' takes whole ones; set pp_weights.gather=full"]
        two.append("rollout.engine=vllm")
        assert problems(*two) == [f"{shards}, and rollout.tp=1 cuts in another way; set rollout.tp=2 or pp_weights.gather=full"]
        check(*two, "rollout.tp=2")
        check("rollout.engine=vllm", "pp_weights.gather=pp", "rollout.tp=2")  # actor.parallel.tp=1: no shards

    @pytest.mark.parametrize(
        "vocab_size, fits", [(100, True), (128, True), (130, False), (300, False), (49152, True), (61, False)]
    )
    def test_shards_of_the_vocabulary_must_be_the_same_rows(self, here: Path, vocab_size: int, fits: bool) -> None:
        """At tp=4 Megatron pads 130 to 256 and cuts at 64 and 128; vLLM pads it to 192 and cuts at 48 and 96."""
        write_model(here / "v", vocab_size=vocab_size)
        four = ["model.path=v", "pp_weights.gather=pp", "actor.parallel.tp=4", "rollout.engine=vllm", "rollout.tp=4"]
        if fits:
            check(*four)
        else:
            (found,) = problems(*four)
            assert f"vLLM cuts vocab_size={vocab_size} at" in found and "set pp_weights.gather=full" in found

    def test_reading_in_place_is_for_one_vllm_worker_in_the_models_own_dtype(self, here: Path) -> None:
        wrong = ["pp_weights.zero_copy=true", "rollout.dtype=bfloat16", "pp_weights.mode=bucketed"]
        key = "pp_weights.zero_copy=true"
        assert problems(*wrong) == [
            f"{key} is for vLLM, and rollout.engine='hf'; turn it off or set rollout.engine=vllm",
            f"{key} reads the weights as they were trained, in model.dtype='float32', and rollout.dtype='bfloat16'; "
            "make them equal or turn it off",
            f"{key} needs the whole model in one buffer, and pp_weights.mode='bucketed'; use mode=full or turn it off",
        ]
        assert problems(key, "rollout.engine=vllm", "rollout.tp=2") == [
            f"{key} needs whole tensors, and rollout.tp=2 workers cut them; turn it off or set rollout.tp=1"
        ]
        check(key, "rollout.engine=vllm")

    def test_the_cache_must_hold_the_longest_sequence(self) -> None:
        # 2 (k, v) x 8 layers x 4 heads x 32 x 4 bytes x 96 tokens = 786432
        check("rollout.engine=vllm", "rollout.kv_cache_bytes=786432")
        (error,) = problems("rollout.engine=vllm", "rollout.kv_cache_bytes=786431")
        assert "which takes 786432 bytes" in error

    def test_shared_memory_needs_one_host(self) -> None:
        overrides = ["actor.parallel.pp=2", "pp_weights.transport=shared_memory"]
        check(*overrides, world_size=2, local=2)
        (error,) = problems(*overrides, world_size=2, local=1)
        assert error.startswith("pp_weights.transport='shared_memory' needs all 2 ranks on one host, but this host has 1")

    def test_an_engine_that_is_not_installed_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("megappo.config.check_files.find_spec", lambda name: None)
        errors = problems("rollout.engine=vllm", "run.trackers=[tensorboard]", "data.validation=reasoning_gym:chain_sum")
        assert [error.split(",")[0].split(" needs")[0] for error in errors] == [
            "data.validation='reasoning_gym:chain_sum'",
            "rollout.engine='vllm'",
            "run.trackers=['tensorboard']",
        ]


class TestFiles:
    def test_a_missing_model_folder_is_one_line(self, here: Path) -> None:
        (error,) = problems("model.path=nowhere")
        assert error.startswith("model.path='nowhere' is not a folder")

    def test_a_missing_critic_is_refused_under_its_own_key(self, here: Path) -> None:
        (error,) = problems("critic.path=nowhere")
        assert error.startswith("critic.path='nowhere' is not a folder")

    def test_another_vocabulary_is_refused(self, here: Path) -> None:
        write_model(here / "other", vocab_size=101)
        (error,) = problems("reference.path=other")
        assert error == "reference.path='other' has vocab_size=101, but model.path has 100; use a model with the same tokenizer"

    def test_a_smaller_critic_is_fine(self, here: Path) -> None:
        write_model(here / "small", num_hidden_layers=2)
        assert check("critic.path=small").layouts["critic"].num_layers == 2
        (error,) = problems("critic.path=small", "actor.parallel.pp=4")
        assert error.startswith("critic.parallel.pp=4 does not divide num_layers=2; use 1 or 2")

    def test_a_model_of_no_known_family_is_refused(self, here: Path) -> None:
        write_model(here / "other", architectures=["T5Model"])
        (error,) = problems("model.path=other")
        assert "architectures=['T5Model'] is not supported; use one of LlamaForCausalLM" in error

    def test_a_quantised_model_is_refused(self, here: Path) -> None:
        write_model(here / "fp8", quantization_config={"quant_method": "fp8"})
        (error,) = problems("model.path=fp8")
        assert error == (
            "model.path='fp8' is quantised (config.json has quantization_config with quant_method='fp8'), which is not "
            "supported; use the full one"
        )
        write_model(here / "modelopt")
        (here / "modelopt" / "hf_quant_config.json").write_text("{}")
        (error,) = problems("critic.path=modelopt")
        assert error.startswith("critic.path='modelopt' is quantised (it has hf_quant_config.json)")

    def test_weights_of_a_narrow_dtype_are_refused_whatever_config_json_says(self, here: Path) -> None:
        write_model(here / "bare")
        weights = {"model.norm.weight": torch.zeros(2), "lm_head.weight": torch.zeros(2, 2, dtype=torch.float8_e4m3fn)}
        save_file(weights, here / "bare" / "model.safetensors")
        (error,) = problems("model.path=bare")
        assert error.startswith("model.path='bare' is quantised (lm_head.weight is F8_E4M3 in model.safetensors)")

    @pytest.mark.parametrize("dtype", ["fp8", "float8_e4m3fn", "int8"])
    @pytest.mark.usefixtures("here")
    def test_a_quantised_engine_is_refused(self, dtype: str) -> None:
        assert problems(f"rollout.dtype={dtype}") == [f"rollout.dtype='{dtype}' is a string; give one of float32, bfloat16"]

    def test_a_folder_without_weights_is_refused(self, here: Path) -> None:
        (here / "m" / "model.safetensors").unlink()
        (error,) = problems()
        assert error.startswith("model.path='m' has no .safetensors file")

    def test_a_critic_that_starts_fresh_needs_no_weights(self, here: Path) -> None:
        write_model(here / "sizes", num_hidden_layers=2)
        (here / "sizes" / "model.safetensors").unlink()
        (error,) = problems("critic.path=sizes")
        assert error.startswith("critic.path='sizes' has no .safetensors file")
        assert check("critic.path=sizes", "critic.start=fresh").shapes["critic"].num_layers == 2
        (error,) = problems("critic.path=nowhere", "critic.start=fresh")  # its sizes it does need
        assert error.startswith("critic.path='nowhere' is not a folder")

    def test_a_missing_tokenizer_is_refused(self, here: Path) -> None:
        (error,) = problems("model.tokenizer=nowhere.model")
        assert error.startswith("model.tokenizer='nowhere.model' does not exist")

    def test_data_files_must_be_there(self, here: Path) -> None:
        (here / "empty.jsonl").touch()
        errors = problems("data.train=nowhere.jsonl", "data.validation=empty.jsonl")
        assert [error.split(";")[0] for error in errors] == [
            "data.train='nowhere.jsonl' does not exist",
            "data.validation='empty.jsonl' is an empty file",
        ]

    def test_every_source_must_be_one_and_be_named_once(self, here: Path) -> None:
        (here / "rows.csv").write_text("prompt\n")
        (here / "folder").mkdir()
        errors = problems("data.train=[t.jsonl,rows.csv,t.jsonl,'reasoning_gym:']", "data.validation=[folder,t.jsonl]")
        assert [error.split(";")[0] for error in errors] == [
            "data.train names 't.jsonl' 2 times",
            "data.train='rows.csv' is of no known kind",
            "data.train='reasoning_gym:' names no task",
            "data.validation='folder' is a folder with neither .parquet files nor a saved dataset in it",
        ]
        (error,) = problems("data.train=[]")
        assert error == "data.train=[] names no source; give at least one"

    def test_weights_are_one_for_each_of_several_sources(self, here: Path) -> None:
        (here / "u.jsonl").write_text('{"prompt": "1+1="}\n')
        assert check("data.train=[t.jsonl,u.jsonl]", "data.weights=[3,0.5]").config.data.weights == (3, 0.5)
        for train, weights, message in [
            ("t.jsonl", "[1]", "data.weights=[1] has no effect on the one source of data.train"),
            ("[t.jsonl,u.jsonl]", "[1]", "data.weights=[1] has 1 values, but data.train names 2 sources"),
            ("[t.jsonl,u.jsonl]", "[1,1,1]", "data.weights=[1, 1, 1] has 3 values, but data.train names 2 sources"),
            ("[t.jsonl,u.jsonl]", "[1,0]", "data.weights=[1, 0] must be greater than 0 throughout"),
            ("[t.jsonl,u.jsonl]", "[1,-0.5]", "data.weights=[1, -0.5] must be greater than 0 throughout"),
        ]:
            (error,) = problems(f"data.train={train}", f"data.weights={weights}")
            assert error.startswith(message)

    def test_the_reward_of_generated_tasks_scores_no_other_source(self, here: Path) -> None:
        check("data.train=[reasoning_gym:chain_sum,reasoning_gym:basic_arithmetic]", "reward.function=reasoning_gym")
        (error,) = problems("data.train=[reasoning_gym:chain_sum,t.jsonl]", "reward.function=reasoning_gym")
        assert error.endswith("scores reasoning_gym:TASK only, not data.train=t.jsonl")

    def test_options_of_data_without_effect_are_refused(self, here: Path) -> None:
        for override in ("trainer.validate_every=5", "data.system_prompt=hello", "data.task_options={a: 1}"):
            (error,) = problems(override)
            assert override.split("=")[0] in error
        check("data.system_prompt=hello", "data.chat_template=true")

    def test_a_reward_function_must_be_found_without_running_its_file(self, here: Path) -> None:
        (here / "mine.py").write_text(
            "raise SystemExit('was run')\ndef score(prompt, response, answer, row): return 1.0\nalso = score\n"
        )
        (here / "broken.py").write_text("def score(:\n")
        check("reward.function=mine.py:score")
        check("reward.function=mine.py:also")
        for name, message in {
            "exact_mach": "did you mean exact_match?",
            "nothing": "use one of exact_match, last_number, math, reasoning_gym",
            "mine.py:other": "mine.py defines no 'other'; it has score, also",
            "mine.py": "neither a built-in reward nor path/to/file.py:function",
            "nowhere.py:score": "the file 'nowhere.py' does not exist",
            "broken.py:score": "line 1 of broken.py is not valid Python",
            "reasoning_gym": "scores reasoning_gym:TASK only",
        }.items():
            (error,) = problems(f"reward.function={name}")
            assert message in error

    def test_parts_of_a_reward_are_looked_for_one_by_one(self, here: Path) -> None:
        (here / "mine.py").write_text("def score(prompt, response, answer, row): return 1.0\n")
        check("reward.parts=[{function: mine.py:score, weight: -1}, {function: last_number, weight: 0}]")
        for parts, message in {
            "[{function: mine.py:scor}]": "reward.parts[0].function='mine.py:scor': mine.py defines no 'scor'; it has score",
            "[{function: last_number}, {function: math_}]": "reward.parts[1].function='math_' is neither",
            "[{function: last_number}, {function: mine.py:score, name: last_number}]": (
                "reward.parts[1].name='last_number' is the name of an earlier part, too; give one of them another name"
            ),
            "[{function: last_number, name: a/b}]": "reward.parts[0].name='a/b' becomes part of a metric's name",
        }.items():
            (error,) = problems(f"reward.parts={parts}")
            assert error.startswith(message)
        (error,) = problems("reward.parts=[{function: exact_match}]", "reward.function=last_number")
        assert error == "reward.function='last_number' has no effect beside reward.parts; remove it or make it one of the parts"

    def test_what_a_reward_needs_must_be_installed(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("megappo.config.check_files.find_spec", lambda name: None)
        (error,) = problems("reward.function=math")
        assert error.startswith(
            "reward.function='math' needs the package math_verify, which is not installed; install megappo with"
        )

    def test_limits_of_rewards(self, here: Path) -> None:
        assert problems("reward.timeout_s=0", "reward.workers=0") == [
            "reward.workers=0 must be at least 1",
            "reward.timeout_s=0.0 must be more than 0",
        ]

    def test_all_problems_are_listed_at_once(self, here: Path) -> None:
        errors = problems("actor.parallel.pp=3", "rollout.temperature=0", "data.train=nowhere", "critic.epochs=0", "run.name=a/b")
        assert len(errors) == 5


@pytest.mark.usefixtures("here")
def test_engines_are_spread_over_the_ranks_or_get_their_own() -> None:
    layout = "actor.parallel={pp: 4, dp: 2}"
    plan = check(layout)
    assert (plan.engine_ranks, plan.training_ranks, plan.world_size) == ((0,), 8, 8)
    assert check(layout, "rollout.engines=2").engine_ranks == (0, 4)
    assert check(layout, "rollout.engines=3").engine_ranks == (0, 2, 4)
    assert check(layout, "rollout.engines=8").engine_ranks == tuple(range(8))
    plan = check(layout, "rollout.engines=3", "rollout.own_ranks=true")
    assert (plan.engine_ranks, plan.training_ranks, plan.world_size) == ((8, 9, 10), 8, 11)
    plan = check(layout, "rollout.engines=3", "rollout.own_ranks=true", command="sft")
    assert (plan.engine_ranks, plan.world_size) == ((), 8)  # it evaluates nothing
    evaluating = ("sft.evaluate_every=5", "data.validation=t.jsonl")
    assert check(layout, "rollout.own_ranks=true", *evaluating, command="sft").world_size == 9


@pytest.mark.usefixtures("here")
def test_more_engines_than_ranks_need_ranks_of_their_own() -> None:
    assert problems("actor.parallel.pp=2", "rollout.engines=3") == [
        "rollout.engines=3 is more than the 2 ranks that train, of which each has one at most; use at most 2, or "
        "rollout.own_ranks=true"
    ]
    assert problems("rollout.engines=0") == ["rollout.engines=0 must be at least 1"]
    assert check("rollout.engines=3", "rollout.own_ranks=true").world_size == 4


@pytest.mark.usefixtures("here")
def test_a_launched_world_has_a_rank_for_each_engine_of_its_own() -> None:
    own = ("actor.parallel.pp=2", "rollout.engines=2", "rollout.own_ranks=true")
    assert check(*own, world_size=4).world_size == 4
    assert problems(*own, world_size=2) == [
        "WORLD_SIZE=2, but actor.parallel needs tp x cp x pp x dp = 1 x 1 x 2 x 1 = 2 ranks and rollout.engines=2 of their own; "
        "start 4 ranks"
    ]
    assert problems(*own, world_size=6)[0].endswith("start 4 ranks, or set actor.parallel.dp=2")
    # two of four ranks are elsewhere: those may be the ones that only generate
    assert check(*own, "pp_weights.transport=shared_memory", world_size=4, local=2).world_size == 4


@pytest.mark.usefixtures("here")
def test_an_evaluation_has_one_engine() -> None:
    with_rows = "data.validation=t.jsonl"
    assert problems(with_rows, "rollout.engines=2", "rollout.own_ranks=true", command="eval") == [
        "rollout.engines=2, but an evaluation has one engine; set rollout.engines=1",
        "rollout.own_ranks=true, but an evaluation is one process and has no ranks; set rollout.own_ranks=false",
    ]
