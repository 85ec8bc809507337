"""What can be typed? `megappo train | sft CONFIG [key=value ...]`. Torch and the rest are imported only once a config holds.

Exit codes: 0 done, 1 a run that failed, 2 a refused command or config, 130 interrupted. stderr ends with the message.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megappo import __version__
from megappo.errors import RunFailed, UserError

if TYPE_CHECKING:
    from megappo.config.check import Plan
    from megappo.config.resolve import Command

_COMMANDS = {
    "train": "train a policy with PPO",
    "sft": "warm-start a policy on the answers of data.train",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    _log_to_stderr()
    try:
        plan = _checked_plan(arguments.command, arguments.config, arguments.overrides)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks of this host refuse the same config; one speaks
            _report(str(error))
        return 2
    try:
        return _run(arguments.command, plan)
    except UserError as error:
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
    for name, purpose in _COMMANDS.items():
        command = commands.add_parser(name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".", allow_abbrev=False)
        command.add_argument("config", metavar="CONFIG", help="YAML file; every key is described in docs/config.md")
        command.add_argument(
            "overrides", metavar="key=value", nargs="*", help="override, e.g. actor.parallel.pp=2; the later wins"
        )
    return parser


def _checked_plan(command: Command, path: str, overrides: Sequence[str]) -> Plan:
    from megappo.config.check import check_config, joined_world_size
    from megappo.config.load import load_config

    config = load_config(path, overrides, command)
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE")
    return check_config(
        config,
        joined_world_size(config, os.environ),
        command,
        int(local_world_size) if local_world_size else None,
    )


def _run(command: Command, plan: Plan) -> int:
    from megappo.trainer import run

    return run.sft(plan) if command == "sft" else run.train(plan)


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
