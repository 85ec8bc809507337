"""May an engine generate? Traps A15, A16, A20 as a state machine."""

from __future__ import annotations

import pytest

from megappo.errors import RunFailed
from megappo.rollout.state import EngineState


def test_generate_before_the_first_update_says_so() -> None:
    with pytest.raises(RunFailed, match="the engine cannot generate: no weights have been published"):
        EngineState("the engine").require_generate()


def update(state: EngineState, version: int) -> None:
    state.begin_update(version)
    with state.updating() as under_way:
        assert under_way == version
        state.commit()


def test_a_complete_update_gives_its_version() -> None:
    state = EngineState("the engine")
    update(state, 7)
    assert state.require_generate() == 7


def test_an_update_that_stops_half_way_refuses_until_one_completes() -> None:
    state = EngineState("the engine")
    update(state, 1)
    state.begin_update(2)
    with pytest.raises(RunFailed, match="the update to weights version 2 did not complete"):
        state.require_generate()
    with pytest.raises(RunFailed, match="missing: a"), state.updating():
        raise RunFailed("missing: a.weight")
    assert state.weight_version is None
    with pytest.raises(RunFailed, match=r"version 2 failed \(missing: a.weight\)"):
        state.require_generate()
    update(state, 3)
    assert state.require_generate() == 3


def test_nothing_of_an_update_follows_its_failure() -> None:
    """Else the version would come into force without what failed."""
    state = EngineState("the engine")
    state.begin_update(2)
    with pytest.raises(OSError), state.updating():
        raise OSError("the memory is gone")
    with pytest.raises(RunFailed, match=r"no update under way: .* version 2 failed \(the memory is gone\)"), state.updating():
        state.commit()
    assert state.weight_version is None


def test_an_update_that_was_given_up_makes_way_for_the_next() -> None:
    state = EngineState("the engine")
    state.begin_update(2)
    update(state, 3)
    assert state.require_generate() == 3
    with pytest.raises(RunFailed, match="no update under way"), state.updating():
        pass


def test_sleep_gives_the_weights_up_and_wake_alone_is_not_enough() -> None:
    state = EngineState("the engine")
    update(state, 1)
    state.sleep()
    with pytest.raises(RunFailed, match="it is asleep; call wake"):
        state.require_generate()
    with pytest.raises(RunFailed, match="cannot take weights version 2: it is asleep"):
        state.begin_update(2)
    state.wake()
    with pytest.raises(RunFailed, match="it slept and gave its weights up; publish the weights again"):
        state.require_generate()
    update(state, 2)
    assert state.require_generate() == 2


def test_wake_of_an_engine_that_does_not_sleep_changes_nothing() -> None:
    state = EngineState("the engine")
    update(state, 1)
    state.wake()
    assert state.require_generate() == 1


def test_a_closed_engine_refuses_everything_and_keeps_the_first_cause() -> None:
    state = EngineState("the engine")
    state.close("killed by SIGKILL")
    state.close()
    for operation in (state.require_generate, state.sleep, state.wake, lambda: state.begin_update(1)):
        with pytest.raises(RunFailed, match="killed by SIGKILL"):
            operation()
