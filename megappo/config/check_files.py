"""Is everything there that the config names? Models, tokenizer, data files, reward functions, packages. Nothing is executed."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from megappo.checkpoint.format import read_manifest
from megappo.config.resolve import Command, uses_critic
from megappo.config.schema import Config
from megappo.config.schema_learning import RewardConfig
from megappo.data.sources import source_kind, source_list
from megappo.data.tasks import TASK_PREFIX
from megappo.errors import UserError
from megappo.models.quantised import quantisation
from megappo.models.shape import checkpoint_folder
from megappo.rewards.functions import BUILTIN, PACKAGES
from megappo.rewards.parts import Part, reward_parts


def weights_problems(config: Config, command: Command) -> Iterator[str]:
    """Model folders without weights, quantised ones, damaged checkpoints. A folder that is missing is reported with its sizes."""
    folders = {"model.path": config.model.path}
    if command == "train":
        folders |= {"critic.path": str(config.critic.path)} if uses_critic(config) and config.critic.start == "weights" else {}
        folders["reference.path"] = str(config.reference.path)
    seen: set[str] = set()
    for key, path in folders.items():
        try:
            quantised = quantisation(path)
        except UserError:
            continue
        if path in seen:
            continue
        seen.add(path)
        if quantised:
            yield f"{key}={path!r} is quantised ({quantised}), which is not supported; use the full one"
        if checkpoint_folder(path) is not None:
            try:
                read_manifest(path)
            except UserError as error:
                yield f"{key}: {error}"
        elif not any(Path(path).glob("*.safetensors")):
            yield f"{key}={path!r} has no .safetensors file; give a folder with weights, not only config.json"


def tokenizer_problems(config: Config) -> Iterator[str]:
    path = config.model.tokenizer or config.model.path
    if path != config.model.path and not Path(path).exists():
        yield f"model.tokenizer={path!r} does not exist; give a Hugging Face folder or a sentencepiece .model file"


def data_problems(config: Config, command: Command) -> Iterator[str]:
    """Data files that are missing or empty, and options that would have no effect."""
    data = config.data
    read = _sources_read(config, command)
    for key, sources in read.items():
        yield from _source_problems(key, sources)
    if "data.train" in read:
        yield from _mix_problems(data.weights, len(source_list(data.train)))
    key, every = ("trainer.validate_every", config.trainer.validate_every)
    if command == "sft":
        key, every = ("sft.evaluate_every", config.sft.evaluate_every)
    if data.validation is None and every:
        yield f"{key}={every} needs data.validation; give a source of prompts, or set {key}=0"
    if data.system_prompt is not None and not data.chat_template:
        yield "data.system_prompt has no effect with data.chat_template=false; set data.chat_template=true or remove it"
    named = source_list(data.train) + source_list(data.validation)
    if data.task_options and not any(source.startswith(TASK_PREFIX) for source in named):
        yield f"data.task_options has no effect on {', '.join(named)}, which is no {TASK_PREFIX}TASK; remove it"


def _sources_read(config: Config, command: Command) -> dict[str, str | tuple[str, ...] | None]:
    """{key: sources} of the data that the command reads: an evaluation reads no training prompts."""
    read = {"data.train": config.data.train, "data.validation": config.data.validation}
    return {key: value for key, value in read.items() if command != "eval" or key == "data.validation"}


def _source_problems(key: str, value: str | tuple[str, ...] | None) -> Iterator[str]:
    if value == ():
        yield f"{key}=[] names no source; give at least one"
    sources = source_list(value)
    for source in dict.fromkeys(sources):
        if sources.count(source) > 1:
            yield f"{key} names {source!r} {sources.count(source)} times; name it once (data.weights can give it a larger share)"
        try:
            kind = source_kind(source)
        except UserError as error:
            yield f"{key}={error}"
            continue
        if kind == "task" and find_spec("reasoning_gym") is None:
            yield f"{key}={source!r} needs reasoning-gym; install megappo with the extra `tasks`"


def _mix_problems(weights: tuple[float, ...] | None, num_sources: int) -> Iterator[str]:
    if weights is None:
        return
    shown = f"data.weights={list(weights)}"
    if num_sources == 1:
        yield f"{shown} has no effect on the one source of data.train; remove it or name several sources"
    elif len(weights) != num_sources:
        yield f"{shown} has {len(weights)} values, but data.train names {num_sources} sources; give one value for each"
    if not all(weight > 0 for weight in weights):
        yield f"{shown} must be greater than 0 throughout; remove a source that is to contribute nothing from data.train"


def reward_problems(config: Config, command: Command) -> Iterator[str]:
    """Reward functions that cannot be found, and parts that contradict each other. A user's file is parsed, not run."""
    reward, parts = config.reward, reward_parts(config.reward)
    ((key_read, sources), *_) = _sources_read(config, command).items()
    if reward.parts and reward.function != RewardConfig().function:
        yield f"reward.function={reward.function!r} has no effect beside reward.parts; remove it or make it one of the parts"
    for i, part in enumerate(parts):
        yield from _function_problems(part, key_read, source_list(sources))
        key = f"reward.parts[{i}].name={part.name!r}"
        if reward.parts and not re.fullmatch(r"[\w.-]+", part.name):
            yield f"{key} becomes part of a metric's name; use letters, digits, '_', '-' and '.'"
        if part.name in [earlier.name for earlier in parts[:i]]:
            yield f"{key} is the name of an earlier part, too; give one of them another name"


def _function_problems(part: Part, key: str, sources: Sequence[str]) -> Iterator[str]:
    name, shown = part.function, part.shown
    if name in BUILTIN:
        others = [source for source in sources if not source.startswith(TASK_PREFIX)]
        if name == "reasoning_gym" and others:
            yield f"{shown} scores {TASK_PREFIX}TASK only, not {key}={', '.join(others)}"
        if name in PACKAGES and find_spec(PACKAGES[name]) is None:
            yield f"{shown} needs the package {PACKAGES[name]}, which is not installed; install megappo with the extra `tasks`"
        return
    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not function:
        near = difflib.get_close_matches(name, BUILTIN, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(BUILTIN)}"
        yield f"{shown} is neither a built-in reward nor path/to/file.py:function; {hint}"
        return
    if not Path(path).is_file():
        yield f"{shown}: the file {path!r} does not exist; give its path relative to the current directory"
        return
    try:
        defined = _top_level_names(Path(path))
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        line = f" line {error.lineno}" if isinstance(error, SyntaxError) else ""
        yield f"{shown}:{line} of {path} is not valid Python ({error.args[0]}); mend it"
        return
    if function not in defined:
        yield f"{shown}: {path} defines no {function!r}; it has {', '.join(defined) or 'nothing'}"


def extras_problems(config: Config) -> Iterator[str]:
    """Packages that the config asks for and that are not installed."""
    if config.rollout.engine == "vllm" and find_spec("vllm") is None:
        yield "rollout.engine='vllm', but vllm is not installed; install megappo with its extra, or use rollout.engine=hf (slow)"
    if "tensorboard" in config.run.trackers and find_spec("tensorboard") is None:
        yield "run.trackers=['tensorboard'], but tensorboard is not installed; install megappo with the extra `trackers`"


def _top_level_names(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return names
