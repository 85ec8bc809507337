"""Who starts the ranks, and how does a started rank find the others? `detect_launcher`, `join_world`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

from megappo.errors import RunFailed, UserError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def detect_launcher(launcher: str, environ: Mapping[str, str]) -> Literal["local", "torchrun"]:
    """`local`: this process starts the ranks. `torchrun`: it is one of the ranks that were started.

    launcher: run.launcher. Raises UserError where the environment does not fit it."""
    is_rank = "RANK" in environ and "WORLD_SIZE" in environ
    if launcher == "auto":
        launcher = "torchrun" if is_rank else "local"
    if launcher == "torchrun":
        _check_variables(environ)
        return "torchrun"
    if is_rank and environ["WORLD_SIZE"] != "1":
        rank, world_size = environ["RANK"], environ["WORLD_SIZE"]
        raise UserError(
            f"run.launcher=local, but another launcher started this process as rank {rank} of {world_size} and each rank would "
            f"start a world of its own; set run.launcher=torchrun (or auto), or unset RANK and WORLD_SIZE"
        )
    return "local"


def join_world(environ: Mapping[str, str], timeout_s: float = 300.0) -> tuple[int, int, Store]:
    """(rank, world size, store) of a rank that launch_local or torchrun started.

    The store is hosted by the launcher where it says so (TORCHELASTIC_USE_AGENT_STORE), else by rank 0."""
    from torch.distributed import DistError, PrefixStore, TCPStore  # type: ignore[attr-defined]

    _check_variables(environ)
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    host, port = environ["MASTER_ADDR"].strip("[]"), int(environ["MASTER_PORT"])
    is_host = rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(host, port, is_master=is_host, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    except DistError as error:
        action, reason = "host" if is_host else "reach", str(error).splitlines()[0]
        raise RunFailed(
            f"rank {rank} could not {action} the rendezvous store at MASTER_ADDR={host} MASTER_PORT={port}: {reason}"
        ) from error
    return rank, world_size, PrefixStore(store_prefix(environ), store)


def store_prefix(environ: Mapping[str, str]) -> str:
    """Where a run's keys lie on the store; torchrun keeps its store when it restarts the ranks."""
    return f"megappo/attempt_{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _check_variables(environ: Mapping[str, str]) -> None:
    missing = [name for name in VARIABLES if not environ.get(name)]
    if missing:
        raise UserError(
            f"run.launcher=torchrun, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; start the command "
            f"with torchrun, or set run.launcher=local"
        )
    for name in NUMBERS:
        value = environ.get(name, "0")
        if not value.isdecimal():
            raise UserError(f"{name}={value} in the environment is not a number; start the command with torchrun")
    if environ["MASTER_ADDR"] == "(null)":
        raise UserError("MASTER_ADDR=(null) in the environment is no host; set it to the name or address of rank 0's host")
    _check_below(environ, "RANK", "WORLD_SIZE")
    if "LOCAL_WORLD_SIZE" in environ:
        _check_below(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if int(environ["LOCAL_WORLD_SIZE"]) > int(environ["WORLD_SIZE"]):
            raise UserError(
                f"LOCAL_WORLD_SIZE={environ['LOCAL_WORLD_SIZE']} in the environment exceeds WORLD_SIZE={environ['WORLD_SIZE']}; "
                f"unset what another launcher has left"
            )
    # srun with one task for each rank must agree; srun that starts one torchrun on each node has fewer tasks than ranks.
    if environ.get("SLURM_NTASKS") == environ["WORLD_SIZE"] and environ.get("SLURM_PROCID", environ["RANK"]) != environ["RANK"]:
        raise UserError(
            f"RANK={environ['RANK']} and SLURM_PROCID={environ['SLURM_PROCID']} in the environment contradict each other; unset "
            f"what another launcher has left"
        )


def _check_below(environ: Mapping[str, str], name: str, limit: str) -> None:
    if int(environ[name]) >= int(environ[limit]):
        raise UserError(
            f"{name}={environ[name]} in the environment must be below {limit}={environ[limit]}; start the command with torchrun"
        )
