"""Which function does a name mean? A built-in reward, or `path/to/file.py:function`. A file is executed once a process."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from megappo.errors import UserError
from megappo.rewards.functions import BUILTIN, PACKAGES, RewardFunction


def load_reward(name: str) -> RewardFunction:
    """The function, with all imported that it needs. Raises UserError (without the config's key) where there is none."""
    if name in BUILTIN:
        if name in PACKAGES:
            _import_package(PACKAGES[name])
        return BUILTIN[name]
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise UserError(f"is neither a built-in reward nor path/to/file.py:function; use one of {', '.join(BUILTIN)}")
    found = getattr(_module(Path(file)), function, None)
    if not callable(found):
        what = "has no function" if found is None else "has, but not as a function,"
        raise UserError(f"{file!r} {what} {function!r}; define it or mend the name")
    reward: RewardFunction = found
    return reward


def _import_package(package: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"{package} cannot be imported ({error}); pip install 'megappo[tasks]'") from None


@functools.cache
def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"the file {str(path)!r} does not exist; give a path from the current directory")
    module_name = f"megappo_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # where dataclasses and pickle look for what the file defines
    sys.path.insert(0, str(path.parent.resolve()))  # as for a script: it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything; the message says what
        raise UserError(f"importing the file raised {type(error).__name__}: {error}; mend {str(path)!r}") from error
    return module
