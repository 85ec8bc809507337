"""The record of the first cause."""

from __future__ import annotations

import os
import time

import pytest

from megappo.controller.failure import (
    FILE_NAME,
    Failure,
    RankFailed,
    discard_failure,
    failure_of,
    is_consequence,
    read_failure,
    write_failure,
)
from megappo.errors import RunFailed, UserError


def raised(error: Exception) -> Exception:
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


def test_the_first_failure_that_is_written_stays(tmp_path):
    first = failure_of(raised(ValueError("first")), 1, "actor.update", tmp_path)
    second = failure_of(raised(ValueError("second")), 2, "actor.update", tmp_path)
    assert read_failure(tmp_path) is None
    assert write_failure(tmp_path, first) == first
    assert write_failure(tmp_path, second) == first
    assert read_failure(tmp_path) == first


def test_the_message_names_rank_phase_error_and_log(tmp_path):
    failure = failure_of(raised(KeyError("x")), 3, "critic.update", tmp_path)
    log = tmp_path / "logs" / "rank_00003.log"
    who = f"rank 3 (host {failure.host}, pid {os.getpid()})"
    assert str(failure) == f"{who} failed in critic.update: KeyError: 'x'; log: {log}"
    assert "raise error" in failure.traceback
    assert Failure.from_json(failure.to_json()) == failure


def test_a_failure_becomes_the_error_that_the_command_line_knows(tmp_path):
    user = failure_of(raised(UserError("model.path=x: no such folder")), 1, "build", tmp_path).error()
    assert (type(user), str(user)) == (UserError, "model.path=x: no such folder")
    other = failure_of(raised(ValueError("boom")), 1, "build", tmp_path).error()
    assert isinstance(other, RunFailed)
    assert "failed in build: ValueError: boom" in str(other)
    assert any("Traceback" in note for note in other.__notes__)


def test_a_failure_that_was_heard_of_is_not_counted_again(tmp_path):
    first = failure_of(raised(ValueError("first")), 1, "actor.update", tmp_path)
    assert failure_of(raised(RankFailed(first)), 0, "driver", tmp_path) is first


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[../pair.cc:544] Connection closed by peer [127.0.0.1]:31711"), True),
        (RuntimeError("Timed out waiting 3000ms for recv operation to complete"), True),
        (ConnectionResetError("[Errno 104] Connection reset by peer"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("connection closed by peer"), False),
    ],
)
def test_a_lost_peer_is_a_consequence_and_a_wrong_shape_is_not(error, expected):
    assert is_consequence(error) is expected


def test_only_a_record_of_a_former_run_is_discarded(tmp_path):
    write_failure(tmp_path, failure_of(raised(ValueError("now")), 0, "x", tmp_path))
    discard_failure(tmp_path, older_than=time.time() - 100)
    assert (tmp_path / FILE_NAME).exists()
    os.utime(tmp_path / FILE_NAME, (0, 1000))
    discard_failure(tmp_path, older_than=time.time() - 100)
    assert not (tmp_path / FILE_NAME).exists()
