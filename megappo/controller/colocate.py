"""How do several roles live in one process? One worker object that passes each call on to the role its prefix names.

worker = create_colocated_worker({"actor": actor, "critic": critic}, activate=groups.active)
worker.actor_update(...)            # the method `update` of the actor, with the actor's process groups active
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megappo.controller.dispatch import dispatch_mode

Activate = Callable[[str], AbstractContextManager[object]]


class ColocatedWorker:
    """Every dispatched method of every role, as `{role}_{method}`. Made by `create_colocated_worker`."""

    def __init__(self, roles: Mapping[str, object], activate: Activate | None) -> None:
        self.roles = dict(roles)
        activate = activate or (lambda role: nullcontext())
        methods: dict[str, Callable[..., Any]] = {}
        owners: dict[str, str] = {}
        for role, target in self.roles.items():
            # The class is searched, not the object: reading a property of the object could start work.
            names = [name for name in dir(type(target)) if dispatch_mode(getattr(type(target), name)) is not None]
            if not names:
                raise ValueError(f"role {role!r}: {type(target).__name__} has no method marked with @dispatched")
            for method_name in names:
                public_name = f"{role}_{method_name}"
                if public_name in methods:
                    raise ValueError(f"{owners[public_name]} and {role}.{method_name} would both be called {public_name}")
                methods[public_name] = _delegate(role, getattr(target, method_name), activate)
                owners[public_name] = f"{role}.{method_name}"
        self.methods = methods

    def method(self, role: str, name: str) -> Callable[..., Any]:
        """The method `name` of a role."""
        return self._find(f"{role}_{name}", f"{role}.{name}")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in ("methods", "roles"):  # not set yet: __init__ failed or a copy is being made
            raise AttributeError(name)
        return self._find(name, name)

    def _find(self, name: str, shown: str) -> Callable[..., Any]:
        if name not in self.methods:
            known = ", ".join(sorted(self.methods)) or "none"
            raise AttributeError(f"no dispatched method {shown}; the colocated worker has: {known}")
        return self.methods[name]


def create_colocated_worker(cls_dict: Mapping[str, object], activate: Activate | None = None) -> ColocatedWorker:
    """A class instance that delegates the calls to every object in `cls_dict` (role -> object) by the role's prefix.

    activate: what to enter around each call of a role, e.g. the process groups of its layout (`activate(role)`).
    """
    return ColocatedWorker(cls_dict, activate)


def _delegate(role: str, method: Callable[..., Any], activate: Activate) -> Callable[..., Any]:
    @functools.wraps(method)  # keeps the dispatch mark
    def call(*args: Any, **kwargs: Any) -> Any:
        with activate(role):
            return method(*args, **kwargs)

    return call
