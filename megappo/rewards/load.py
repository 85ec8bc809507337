"""Which function does `reward.function` mean? The name of a built-in one, or `path/to/file.py:function`."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from pathlib import Path

from megappo.errors import UserError
from megappo.rewards.functions import BUILTIN, RewardFunction


def load_reward(name: str) -> RewardFunction:
    """The reward function of that name. Raises UserError where there is none."""
    if name in BUILTIN:
        return BUILTIN[name]
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        near = difflib.get_close_matches(name, BUILTIN, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(BUILTIN)}"
        raise UserError(f"reward.function={name!r} is neither a built-in reward nor path/to/file.py:function; {hint}")
    return _from_file(name, Path(file), function)


def _from_file(name: str, path: Path, function: str) -> RewardFunction:
    if not path.is_file():
        raise UserError(
            f"reward.function={name!r}: the file {str(path)!r} does not exist; give a path from the current directory"
        )
    module_name = f"megappo_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # where dataclasses and pickle look for what the file defines
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code may raise anything; the message says what
        raise UserError(
            f"reward.function={name!r}: importing the file raised {type(error).__name__}: {error}; mend {str(path)!r}"
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        what = "has no function" if found is None else "has, but not as a function,"
        raise UserError(f"reward.function={name!r}: {str(path)!r} {what} {function!r}; define it or mend the name")
    reward: RewardFunction = found
    return reward
