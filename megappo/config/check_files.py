"""Is everything there that the config names? Models, tokenizer, data files, reward functions, packages. Nothing is executed."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from megappo.config.resolve import Command
from megappo.config.schema import Config
from megappo.data.tasks import TASK_PREFIX
from megappo.errors import UserError
from megappo.models.shape import read_hf_config
from megappo.rewards.functions import BUILTIN


def weights_problems(config: Config, command: Command) -> Iterator[str]:
    """Model folders without weights, and quantised ones. A folder that is missing altogether is reported with its sizes."""
    folders = {"model.path": config.model.path}
    if command == "train":
        folders |= {"critic.path": str(config.critic.path), "reference.path": str(config.reference.path)}
    seen: set[str] = set()
    for key, path in folders.items():
        try:
            hf = read_hf_config(path)
        except UserError:
            continue
        if path in seen:
            continue
        seen.add(path)
        if hf.get("quantization_config"):
            yield f"{key}={path!r} is quantised (config.json has quantization_config), which is not supported; use the full one"
        if not any(Path(path).glob("*.safetensors")):
            yield f"{key}={path!r} has no .safetensors file; give a folder with weights, not only config.json"


def tokenizer_problems(config: Config) -> Iterator[str]:
    path = config.model.tokenizer or config.model.path
    if path != config.model.path and not Path(path).exists():
        yield f"model.tokenizer={path!r} does not exist; give a Hugging Face folder or a sentencepiece .model file"


def data_problems(config: Config, command: Command) -> Iterator[str]:
    """Data files that are missing or empty, and options that would have no effect."""
    data = config.data
    for key, source in (("data.train", data.train), ("data.validation", data.validation)):
        if source is None:
            continue
        if source.startswith(TASK_PREFIX):
            if source == TASK_PREFIX:
                yield f"{key}={source!r} names no task; give one, e.g. {TASK_PREFIX}basic_arithmetic"
            if find_spec("reasoning_gym") is None:
                yield f"{key}={source!r} needs reasoning-gym; install megappo with the extra `tasks`"
        elif not Path(source).is_file():
            yield f"{key}={source!r} is not a file; give a JSONL file, relative to the current directory"
        elif Path(source).stat().st_size == 0:
            yield f"{key}={source!r} is empty; give a JSONL file with one prompt a line"
    key, every = ("trainer.validate_every", config.trainer.validate_every)
    if command == "sft":
        key, every = ("sft.evaluate_every", config.sft.evaluate_every)
    if data.validation is None and every:
        yield f"{key}={every} needs data.validation; give a JSONL file, or set {key}=0"
    if data.system_prompt is not None and not data.chat_template:
        yield "data.system_prompt has no effect with data.chat_template=false; set data.chat_template=true or remove it"
    if data.task_options and not any((source or "").startswith(TASK_PREFIX) for source in (data.train, data.validation)):
        yield f"data.task_options has no effect on data.train={data.train!r}, which is no {TASK_PREFIX}TASK; remove it"


def reward_problems(config: Config) -> Iterator[str]:
    """A reward function that cannot be found. A user's file is parsed, not run."""
    name = config.reward.function
    if name in BUILTIN:
        if name == "reasoning_gym" and not config.data.train.startswith(TASK_PREFIX):
            yield f"reward.function='reasoning_gym' scores {TASK_PREFIX}TASK only, not data.train={config.data.train!r}"
        return
    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not function:
        near = difflib.get_close_matches(name, BUILTIN, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(BUILTIN)}"
        yield f"reward.function={name!r} is neither a built-in reward nor path/to/file.py:function; {hint}"
        return
    if not Path(path).is_file():
        yield f"reward.function={name!r}: the file {path!r} does not exist; give its path relative to the current directory"
        return
    try:
        defined = _top_level_names(Path(path))
    except (SyntaxError, UnicodeDecodeError, ValueError) as error:
        line = f" line {error.lineno}" if isinstance(error, SyntaxError) else ""
        yield f"reward.function={name!r}:{line} of {path} is not valid Python ({error.args[0]}); mend it"
        return
    if function not in defined:
        yield f"reward.function={name!r}: {path} defines no {function!r}; it has {', '.join(defined) or 'nothing'}"


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
