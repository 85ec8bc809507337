"""What runs in a reward worker? `python -m megappo.rewards.worker`: loads reward functions, then calls one after the other.

Started by `pool.RewardPool` only. What the user's code prints goes where the driver pointed stdout and stderr. It leads its own
process group and ends with the driver, whichever way that ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import traceback
from multiprocessing.connection import Connection

from megappo.errors import UserError
from megappo.lifeline import die_with_parent, kill_own_group
from megappo.rewards.call import Outcome, ScoreRequest, call_reward, failed, raised, shortened
from megappo.rewards.functions import RewardFunction
from megappo.rewards.load import load_reward


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m megappo.rewards.worker")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the driver")
    parser.add_argument("--parent", type=int, required=True, help="process id of the driver")
    parser.add_argument("--kernel-signal", type=int, required=True, help="1: the starting thread lives as long as the driver")
    args = parser.parse_args()
    die_with_parent(args.parent, bool(args.kernel_signal), kill_own_group)
    os.set_inheritable(args.fd, False)
    connection = Connection(args.fd)
    os.register_at_fork(after_in_child=connection.close)  # a child that held it would hide this process's death from the driver
    with contextlib.suppress(EOFError, ConnectionError):  # the driver has closed the pool, or is gone
        _serve(connection)


def _serve(connection: Connection) -> None:
    """First message in: the functions' names. First one out: {name: why it cannot be loaded}. Then one outcome a call."""
    functions, refused = _load(connection.recv())
    connection.send(refused)
    while not refused:
        connection.send(tuple(_answer(functions, connection.recv_bytes())))


def _load(names: list[str]) -> tuple[list[RewardFunction], dict[str, str]]:
    functions, refused = [], {}
    for name in names:
        try:
            functions.append(load_reward(name))
        except UserError as error:
            if error.__cause__ is not None:
                traceback.print_exception(error.__cause__)
            refused[name] = shortened(str(error))
    return functions, refused


def _answer(functions: list[RewardFunction], message: bytes) -> Outcome:
    try:
        index, request = pickle.loads(message)
    except Exception as error:  # noqa: BLE001 - a row can hold any object; what it cannot do here is the sample's failure
        return failed(f"cannot be given the row, which does not unpickle ({type(error).__name__}: {error}),")
    assert isinstance(request, ScoreRequest)
    try:
        return call_reward(functions[index], request)
    except SystemExit as error:  # sys.exit() of the user's code
        return raised(error)


if __name__ == "__main__":
    main()
