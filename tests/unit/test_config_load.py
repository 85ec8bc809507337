"""Is a config read as written, and refused where it is wrong?"""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest

from megappo.config.convert import all_keys
from megappo.config.load import dump_config, load_config
from megappo.config.nearest import nearest_key
from megappo.config.resolve import resolve
from megappo.config.schema import Config
from megappo.config.schema_learning import RewardPart
from megappo.errors import UserError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
BASE = "model: {path: m}\ndata: {train: t.jsonl}\n"


@pytest.fixture
def load(tmp_path: Path):
    def load(text: str = BASE, *overrides: str, command: str = "train") -> Config:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return load_config(path, overrides, command)  # type: ignore[arg-type]

    return load


@pytest.fixture
def errors_of(load):
    def errors_of(text: str = BASE, *overrides: str, command: str = "train") -> list[str]:
        with pytest.raises(UserError) as caught:
            load(text, *overrides, command=command)
        return str(caught.value).splitlines()

    return errors_of


def test_values_come_from_file_then_overrides_and_the_later_override_wins(load) -> None:
    config = load(
        BASE + "actor: {optimizer: {lr: 1e-5}}", "actor.optimizer.lr=2e-5", "actor.optimizer.lr=3e-5", "trainer.steps=7"
    )
    assert config.actor.optimizer.lr == 3e-5
    assert config.trainer.steps == 7
    assert config.model.path == "m"
    assert config.critic.optimizer.lr == Config().critic.optimizer.lr


def test_a_section_whose_keys_are_all_commented_out_is_its_defaults(load) -> None:
    assert load(BASE + "actor:\n  # epochs: 2\nrollout: {}\n").actor.epochs == 1


def test_lists_become_tuples_and_nothing_can_be_changed(load) -> None:
    config = load(
        BASE, "actor.parallel.layers_per_stage=[3, 1]", "actor.optimizer.betas=[0.9, 0.999]", "data.task_options={digits: [1, 2]}"
    )
    assert config.actor.parallel.layers_per_stage == (3, 1)
    assert config.actor.optimizer.betas == (0.9, 0.999)
    assert config.data.task_options == {"digits": (1, 2)}
    hash(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.trainer.steps = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="cannot be changed"):
        config.data.task_options["digits"] = 1
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_configs_of_the_repository_load(path: Path) -> None:
    load_config(path, command="sft" if "sft" in path.name else "train")


def test_relative_paths_stay_relative_to_the_current_directory(load) -> None:
    assert load(BASE, "data.train=some/where.jsonl").data.train == "some/where.jsonl"


def test_a_key_for_one_or_several_takes_a_string_or_a_list(load, errors_of) -> None:
    assert load("model: {path: m}\ndata: {train: [a.jsonl, b]}\n").data.train == ("a.jsonl", "b")
    assert load(BASE, "data.train=[a.jsonl,b]", "data.validation=c").data.train == ("a.jsonl", "b")
    assert load(BASE, "data.train=[a]", "data.validation=007").data.validation == "007"
    assert load(BASE, "data.validation=[a]", "data.validation=null").data.validation is None
    config = load(BASE, "data.train=[a,b]", "data.weights=[1,0.5]")
    assert load(dump_config(config)) == config
    (error, _) = errors_of(BASE, "data.train=[a,5]")
    assert error == "data.train=['a', 5] is a list; give a string or a list of values, each a string"


def test_a_list_of_sections_comes_from_a_file_or_an_override(load, errors_of) -> None:
    text = BASE + "reward:\n  parts:\n    - {function: exact_match}\n    - {function: a.py:f, weight: 2, name: style}\n"
    assert load(text).reward.parts == (RewardPart("exact_match", 1.0, None), RewardPart("a.py:f", 2.0, "style"))
    config = load(text, "reward.parts=[{function: last_number, weight: 0.5}]")
    assert config.reward.parts == (RewardPart("last_number", 0.5, None),)
    assert isinstance(config.reward.parts[0].weight, float)
    assert load(dump_config(config)) == config
    hash(config)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            "[{function: a}, {function: b, wieght: 2}]",
            "reward.parts[1].wieght is not a key; did you mean reward.parts[1].weight?",
        ),
        ("[{function: a, colour: 2}]", "reward.parts[0].colour is not a key; reward.parts[0] knows function, weight, name"),
        ("[{function: a, weight: x}]", "reward.parts[0].weight='x' is a string; give a finite number, e.g. 1.0"),
        ("[{weight: 2}]", "reward.parts[0].function is mandatory and not set; add it"),
        (
            "[exact_match]",
            "reward.parts[0]='exact_match' is a string; reward.parts[0] is a section: give its keys, e.g. {function: VALUE}",
        ),
        ("exact_match", "reward.parts='exact_match' is a string; give a list of sections"),
    ],
)
def test_a_misfit_in_a_list_of_sections_is_named_with_its_place(errors_of, parts: str, message: str) -> None:
    assert errors_of(BASE, f"reward.parts={parts}") == [message]


@pytest.mark.parametrize("override", ["reward.parts={function: a}", "reward.parts.0.weight=2", "run.trackers={a: 1}"])
def test_a_section_in_place_of_a_list_is_refused(errors_of, override: str) -> None:
    (error,) = errors_of(BASE, override)
    assert error.startswith(f"{override}: a section stands where a list belongs")
    (error,) = errors_of(BASE + "reward: {parts: {function: a}}")
    assert "config.yaml: a section stands where a list belongs" in error


def test_a_string_key_takes_an_override_as_it_was_typed(load) -> None:
    config = load(BASE, "run.name=007", "data.system_prompt=a: [b", "model.tokenizer=null", "run.dir=[a]")
    assert config.run.dir == "[a]"
    assert config.run.name == "007"
    assert config.data.system_prompt == "a: [b"
    assert config.model.tokenizer == "m"


def test_an_interpolation_sees_other_keys_and_their_defaults(load) -> None:
    assert (
        load(BASE + "run: {dir: ${model.path}/${run.name}}".replace("${", '"${', 1).replace("name}", 'name}"')).run.dir == "m/run"
    )
    assert load(BASE, "trainer.steps=${rollout.max_num_seqs}").trainer.steps == 128


def test_an_interpolation_that_leads_nowhere_is_refused(errors_of) -> None:
    (error,) = errors_of(BASE, "run.dir=${run.nowhere}")
    assert "run.nowhere" in error


@pytest.mark.parametrize(
    "unknown, meant",
    [
        ("lerning_rate", "actor.optimizer.lr"),
        ("learning_rate", "actor.optimizer.lr"),
        ("critic.lr", "critic.optimizer.lr"),  # the right key at the wrong level
        ("num-epochs", "actor.epochs"),
        ("critic.num_epochs", "critic.epochs"),
        ("actor.tp", "actor.parallel.tp"),
        ("rollout.temprature", "rollout.temperature"),
        ("trainer.max_new_tokens", "rollout.max_new_tokens"),
        ("actr", "actor"),
        ("critic.paralel", "critic.parallel"),
        ("optimizer", "actor.optimizer"),
        ("trainer.total_steps", "trainer.steps"),
        ("algorithm.lam", "algorithm.gae_lambda"),
        ("algorithm.adv_estimator", "algorithm.advantages"),
        ("algorithm.clip_ratio_high", "algorithm.clip_range_high"),
        ("actor.loss_agg_mode", "algorithm.loss_aggregation"),
        ("algorithm.tis_imp_ratio_cap", "algorithm.importance.cap"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_one(errors_of, unknown: str, meant: str) -> None:
    wanted = f"{unknown} is not a key; did you mean {meant}?"
    assert errors_of(BASE, f"{unknown}=1") == [wanted]
    *sections, leaf = unknown.split(".")
    text = "".join(f"{section}: {{" for section in sections) + f"{leaf}: 1" + "}" * len(sections)
    base = "data: {train: t.jsonl}\nmodel: {path: m}\n"
    assert errors_of(base + text) == [wanted]


def test_a_key_like_no_other_is_refused_with_the_keys_of_its_section(errors_of) -> None:
    (error,) = errors_of(BASE, "model.zzzz=1")
    assert error == "model.zzzz is not a key; model knows path, tokenizer, dtype"


def test_every_key_is_nearest_to_itself() -> None:
    keys = list(all_keys())
    assert [nearest_key(key, keys) for key in keys] == keys


@pytest.mark.parametrize("override", ["actor..epochs=1", "epochs", "=1", ".a=1", "actor.=1", "actor[epochs]=1", ""])
def test_a_malformed_override_is_refused(errors_of, override: str) -> None:
    (error,) = errors_of(BASE, override)
    assert error.startswith(f"override {override!r} is not of the form a.b=c; write it like ")


@pytest.mark.parametrize(
    "override, message",
    [
        ("trainer.steps='5'", "'5' is a string; give an integer, e.g. 100"),
        ("trainer.steps=true", "true is a boolean; give an integer, e.g. 100"),
        ("trainer.steps=2.5", "2.5 is a number; give an integer, e.g. 100"),
        ("trainer.steps=null", "null is empty; give an integer, e.g. 100"),
        ("trainer.steps=[1]", "[1] is a list; give an integer, e.g. 100"),
        ("actor.optimizer.lr=high", "'high' is a string; give a finite number, e.g. 1e-06"),
        ("actor.optimizer.lr=.nan", "nan is not finite; give a finite number, e.g. 1e-06"),
        ("actor.packed=1", "1 is an integer; give true or false, e.g. true"),
        ("rollout.engine=sglang", "'sglang' is a string; give one of vllm, hf"),
        ("actor.optimizer.betas=[0.9]", "[0.9] is a list; give a list of 2 values, each a finite number, e.g. [0.9, 0.95]"),
        ("actor.parallel.layers_per_stage=4", "4 is an integer; give a list of values, each an integer"),
        ("actor.parallel=2", "2 is an integer; actor.parallel is a section: give its keys, e.g. actor.parallel.tp"),
        ("actor.epochs.x=2", "{'x': 2} is a section; give an integer, e.g. 1"),
        ("data.task_options=3", "3 is an integer; give a section (key: value)"),
        ("run.trackers=[wandb]", "['wandb'] is a list; give a list of values, each one of tensorboard"),
    ],
)
def test_a_wrong_type_is_refused_with_what_was_wanted(errors_of, override: str, message: str) -> None:
    key = override.partition("=")[0].removesuffix(".x")
    assert errors_of(BASE, override) == [f"{key}={message}"]


def test_an_integer_is_a_number(load) -> None:
    lr = load(BASE, "actor.optimizer.lr=1").actor.optimizer.lr
    assert lr == 1.0
    assert isinstance(lr, float)


def test_a_number_for_a_string_in_the_file_is_refused(errors_of) -> None:
    assert errors_of(BASE + "run: {name: 7}") == ["run.name=7 is an integer; give a string, e.g. 'run'"]


def test_mandatory_keys_must_be_set(errors_of, load) -> None:
    errors = errors_of("run: {name: x}")
    assert [error.split(" is mandatory")[0] for error in errors] == ["model.path", "data.train"]
    assert errors_of(BASE, command="sft") == [
        error for error in errors_of(BASE, command="sft") if error.startswith("sft.output is mandatory and not set; add it to ")
    ]
    assert load(BASE, "sft.output=out", command="sft").sft.output == "out"


def test_all_errors_are_listed_at_once_one_a_line(errors_of) -> None:
    errors = errors_of("lerning_rate: 1\ntrainer: {steps: many}", "a..b=1", "model.path=m")
    assert [error.split(" ")[0] for error in errors] == ["override", "lerning_rate", "trainer.steps='many'", "data.train"]


@pytest.mark.parametrize(
    "text, part",
    [
        ("run: {name: [}", ":1: not valid YAML"),
        ("trainer: {steps: 1}\ntrainer: {steps: 2}", "duplicate key trainer"),
        ("- a\n- b", "holds a list, not sections"),
        ("hello", "hello is not a key"),
        ("trainer.steps: 3", "nest it: trainer: {steps: VALUE}"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(errors_of, text: str, part: str) -> None:
    assert part in errors_of(text)[0]


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(UserError, match=r"config file 'nowhere.yaml' does not exist; give the path of a YAML file"):
        load_config("nowhere.yaml")


def test_open_keys_follow_from_others(load) -> None:
    config = load(BASE, "actor.parallel.pp=2", "trainer.steps=30")
    assert config.critic.parallel == config.actor.parallel
    assert config.reference.parallel == config.actor.parallel
    assert (config.critic.path, config.reference.path, config.model.tokenizer) == ("m", "m", "m")
    assert config.actor.optimizer.decay_steps == config.critic.optimizer.decay_steps == 30
    assert config.reference.enabled is False
    assert load(BASE, "algorithm.kl_coef=0.1").reference.enabled is True
    assert resolve(config) == config


def test_a_layout_of_the_critics_own_does_not_inherit_from_the_actor(load) -> None:
    config = load(BASE, "actor.parallel.pp=2", "actor.parallel.vpp=2", "critic.parallel.tp=2")
    assert (config.critic.parallel.tp, config.critic.parallel.pp, config.critic.parallel.vpp) == (2, 1, 1)
    assert config.reference.parallel.pp == 2


@pytest.mark.parametrize(
    "model, engine, dtype, tolerance",
    [
        ("float32", "null", "float32", 1e-3),
        ("bfloat16", "null", "bfloat16", 5e-2),
        ("float32", "bfloat16", "bfloat16", 5e-2),
        ("bfloat16", "float32", "float32", 5e-2),
    ],
)
def test_the_log_prob_tolerance_is_tight_only_where_both_sides_are_float32(load, model, engine, dtype, tolerance) -> None:
    rollout = load(BASE, f"model.dtype={model}", f"rollout.dtype={engine}").rollout
    assert (rollout.dtype, rollout.logprob_tolerance) == (dtype, tolerance)


def test_sft_decays_over_its_own_steps(load) -> None:
    assert load(BASE, "sft.output=o", "sft.steps=9", command="sft").actor.optimizer.decay_steps == 9


def test_a_dumped_config_loads_back_to_the_same(load, tmp_path: Path) -> None:
    config = load(
        BASE,
        "run.name='1e5'",
        "data.system_prompt='costs ${5}: \"#\" \\n'".replace("${", r"\${"),
        "critic.parallel.tp=2",
        "actor.parallel.layers_per_stage=[3,1]",
        "data.task_options={a: {b: [1, x]}}",
        "actor.optimizer.lr=1e-7",
    )
    assert "${5}" in (config.data.system_prompt or "")
    path = tmp_path / "config.resolved.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
