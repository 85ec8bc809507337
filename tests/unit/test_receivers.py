"""Do several receivers of one update stay in step when one of them fails?"""

from __future__ import annotations

import pytest

from megappo.errors import RunFailed
from megappo.pp_weights.update import Bucket, Guarded, Receivers, Update

UPDATE = Update(4, {}, "", 1)
BUCKET = Bucket(0, (), ())


class Notes:
    """Notes its calls, and fails in one of them."""

    def __init__(self, fails_in: str = "") -> None:
        self.fails_in, self.calls = fails_in, ""

    def start(self, update: Update) -> None:
        self._note("start")

    def settle(self) -> None:
        self._note("settle")

    def load(self, bucket: Bucket) -> None:
        self._note("load")

    def finish(self) -> None:
        self._note("finish")

    def _note(self, call: str) -> None:
        self.calls += f"{call} "
        if call == self.fails_in:
            raise RunFailed(f"no {call}")


def give(receiver: Receivers | Guarded) -> None:
    receiver.start(UPDATE)
    for _ in range(2):
        receiver.settle()
        receiver.load(BUCKET)
    receiver.finish()


ALL_BUT_FINISH = "start settle load settle load "


@pytest.mark.parametrize("step, reached", [("start", "start "), ("settle", "start settle "), ("load", "start settle load ")])
@pytest.mark.parametrize("first", [True, False])
def test_one_that_fails_is_left_alone_and_the_others_go_on_but_do_not_finish(step: str, reached: str, first: bool) -> None:
    bad, good = Notes(step), Notes()
    receivers = Receivers([bad, good] if first else [good, bad])
    with pytest.raises(RunFailed, match=f"no {step}"):
        give(receivers)
    assert (bad.calls, good.calls) == (reached, ALL_BUT_FINISH)
    bad.fails_in = bad.calls = good.calls = ""
    give(receivers)
    assert bad.calls == good.calls == ALL_BUT_FINISH + "finish "


def test_a_failure_of_the_finish_is_raised_and_those_after_it_do_not_finish() -> None:
    before, bad, after = Notes(), Notes("finish"), Notes()
    with pytest.raises(RunFailed, match="no finish"):
        give(Receivers([before, bad, after]))
    assert [notes.calls.endswith("finish ") for notes in (before, bad, after)] == [True, True, False]


def test_without_a_receiver_nothing_is_done() -> None:
    guarded = Guarded(None)
    give(guarded)
    assert guarded.error is None
