"""What can be typed? `megappo train | sft | eval | import | export | weights`. Torch is imported once the arguments hold.

Exit codes: 0 done, 1 a run that failed, 2 a refused command or config, 130 interrupted. stderr ends with the message.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megappo import __version__
from megappo.errors import RunFailed, UserError

if TYPE_CHECKING:
    from megappo.config.check import Plan
    from megappo.config.resolve import Command

_CONFIG = ("config", "CONFIG", "YAML file; every key is described in docs/config.md")
_Commands = dict[str, tuple[str, tuple[tuple[str, str, str], ...]]]  # name -> what it does, (attribute, metavar, help) ...
_COMMANDS: _Commands = {
    "train": ("train a policy with PPO", (_CONFIG,)),
    "sft": ("warm-start a policy on the answers of data.train", (_CONFIG,)),
    "eval": (
        "measure a policy on data.validation: greedy accuracy, avg@k, pass@k",
        (("target", "CONFIG|MODEL", "YAML file, or a Hugging Face folder or checkpoint (then data.validation=FILE, too)"),),
    ),
    "import": (
        "turn a Hugging Face folder into a Megatron checkpoint",
        (("hf_dir", "HF_DIR", "folder with config.json and safetensors"), ("checkpoint", "CKPT", "checkpoint to write")),
    ),
    "export": (
        "turn a Megatron checkpoint into a Hugging Face folder",
        (("checkpoint", "CKPT", "checkpoint, or a step folder of a run"), ("hf_dir", "HF_DIR", "folder to write")),
    ),
}
_SOURCE_HELP = "Hugging Face folder, checkpoint, or run folder"
_WEIGHTS_COMMANDS: _Commands = {
    "explain": ("show how a config's weights would travel to the engine: owners, offsets, senders, memory", (_CONFIG,)),
    "verify": (
        "compare two models tensor by tensor, bit for bit; exit code 1 where they differ",
        (("one", "A", _SOURCE_HELP), ("other", "B", _SOURCE_HELP)),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    _log_to_stderr()
    try:
        return _run(arguments)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks of this host refuse the same config; one speaks
            _report(str(error))
        return 2
    except RunFailed as error:
        _report(str(error))
        return 1
    except KeyboardInterrupt:
        _report("interrupted")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megappo", description="PPO over Megatron pipelines and vLLM.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"megappo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_commands(commands, _COMMANDS)
    purpose = "look at the hand-over of weights, or compare models"
    weights = commands.add_parser("weights", help=purpose, description=purpose[0].upper() + purpose[1:] + ".", allow_abbrev=False)
    _add_commands(weights.add_subparsers(dest="weights_command", required=True, metavar="COMMAND"), _WEIGHTS_COMMANDS)
    return parser


def _add_commands(parsers: Any, commands: _Commands) -> None:
    for name, (purpose, positionals) in commands.items():
        command = parsers.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".", allow_abbrev=False)
        for attribute, metavar, text in positionals:
            command.add_argument(attribute, metavar=metavar, help=text)
        if positionals[0] == _CONFIG or commands is _COMMANDS:
            command.add_argument(
                "overrides", metavar="key=value", nargs="*", help="override, e.g. actor.parallel.pp=2; the later wins"
            )


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "weights":
        from megappo.trainer import weights_command

        if arguments.weights_command == "verify":
            return weights_command.verify(arguments.one, arguments.other)
        return weights_command.explain(_checked_plan("train", arguments.config, arguments.overrides))
    overrides = arguments.overrides
    if arguments.command == "import":
        from megappo.checkpoint.convert import import_model

        return import_model(arguments.hf_dir, arguments.checkpoint, overrides)
    if arguments.command == "export":
        from megappo.checkpoint.convert import export_model

        return export_model(arguments.checkpoint, arguments.hf_dir, overrides)
    if arguments.command == "eval":
        plan = _checked_plan("eval", arguments.target, overrides)
        from megappo.trainer.evaluate_command import evaluate

        return evaluate(plan)
    plan = _checked_plan(arguments.command, arguments.config, overrides)
    from megappo.trainer import run

    return run.sft(plan) if arguments.command == "sft" else run.train(plan)


def _checked_plan(command: Command, target: str, overrides: Sequence[str]) -> Plan:
    """target: a config file; for an evaluation also the model itself."""
    from megappo.config.check import check_here
    from megappo.config.load import load_config
    from megappo.config.model_alone import config_of_model
    from megappo.models.shape import checkpoint_folder

    if command == "eval" and (Path(target).is_dir() or checkpoint_folder(target) is not None):
        config = config_of_model(target, overrides)
    else:
        config = load_config(target, overrides, command)
    return check_here(config, command, os.environ)


def _log_to_stderr() -> None:
    logger = logging.getLogger("megappo")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _report(message: str) -> None:
    """The message, as the last lines on stderr."""
    sys.stdout.flush()
    print(message, file=sys.stderr)
