"""What can be typed? `megappo train | sft CONFIG [key=value ...]`. Torch and the rest are imported only once a config holds.

Exit codes: 0 done, 1 a run that failed, 2 a refused command or config, 130 interrupted. stderr ends with the message.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from megappo import __version__
from megappo.errors import RunFailed, UserError

_COMMANDS = {
    "train": "train a policy with PPO",
    "sft": "warm-start a policy on the answers of data.train",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    _log_to_stderr()
    try:
        return _run(arguments.command, arguments.config, arguments.overrides)
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
        command = commands.add_parser(name, help=purpose, description=purpose.capitalize() + ".", allow_abbrev=False)
        command.add_argument("config", metavar="CONFIG", help="YAML file; every key is described in docs/config.md")
        command.add_argument("overrides", metavar="key=value", nargs="*", help="override, e.g. actor.parallel.pp=2; the later wins")
    return parser


def _run(command: str, path: str, overrides: Sequence[str]) -> int:
    from megappo.config.check import check_config, joined_world_size
    from megappo.config.load import load_config

    if command == "sft":
        config = load_config(path, overrides, "sft")
        check_config(config, joined_world_size(config, os.environ), "sft", _local_world_size())
        from megappo.trainer.run import sft

        return sft(config)
    config = load_config(path, overrides, "train")
    check_config(config, joined_world_size(config, os.environ), "train", _local_world_size())
    from megappo.trainer.run import train

    return train(config)


def _local_world_size() -> int | None:
    return int(os.environ["LOCAL_WORLD_SIZE"]) if "LOCAL_WORLD_SIZE" in os.environ else None


def _log_to_stderr() -> None:
    logger = logging.getLogger("megappo")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _report(message: str) -> None:
    """The message as the last lines on stderr; of the ranks of one host that refuse the same config only the first speaks."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stdout.flush()
        print(message, file=sys.stderr)
