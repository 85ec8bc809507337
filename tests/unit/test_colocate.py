"""Several roles in one process, each reached by its prefix."""

from __future__ import annotations

import contextlib

import pytest

from megappo.controller.colocate import create_colocated_worker
from megappo.controller.dispatch import Dispatch, dispatch_mode, dispatched


class Counter:
    def __init__(self, start: int) -> None:
        self.value = start

    @dispatched(Dispatch.ALL)
    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def private(self) -> None: ...

    @property
    def explosive(self) -> int:
        raise RuntimeError("properties must not be read while methods are looked for")


def test_each_role_gets_the_calls_with_its_prefix():
    worker = create_colocated_worker({"actor": Counter(10), "critic": Counter(20)})
    assert worker.actor_add(1) == 11
    assert worker.critic_add(amount=5) == 25
    assert worker.method("actor", "add")(1) == 12
    assert dispatch_mode(worker.actor_add) is Dispatch.ALL


def test_a_call_runs_with_its_role_activated():
    entered = []

    @contextlib.contextmanager
    def activate(role):
        entered.append(role)
        yield
        entered.append(f"left {role}")

    worker = create_colocated_worker({"actor": Counter(0), "critic": Counter(0)}, activate)
    worker.critic_add(1)
    assert entered == ["critic", "left critic"]


def test_an_unknown_or_unmarked_method_is_an_error_that_names_what_there_is():
    worker = create_colocated_worker({"actor": Counter(0)})
    with pytest.raises(AttributeError, match=r"no dispatched method actor\.private; the colocated worker has: actor_add"):
        worker.method("actor", "private")
    with pytest.raises(AttributeError, match="critic_add"):
        worker.critic_add(1)


def test_two_roles_whose_names_run_together_are_refused():
    class Odd:
        @dispatched(Dispatch.ALL)
        def old_add(self) -> None: ...

    with pytest.raises(ValueError, match=r"actor\.old_add and actor_old\.add would both be called actor_old_add"):
        create_colocated_worker({"actor": Odd(), "actor_old": Counter(0)})


def test_a_role_without_a_dispatched_method_is_refused():
    with pytest.raises(ValueError, match="role 'actor': dict has no method"):
        create_colocated_worker({"actor": {}})
