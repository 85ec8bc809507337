"""How long until 4 workers of this host have read a batch of the driver's? Ours beside verl's DataProto, pickled over pipes.

    python -m benchmarks.algorithms_workers FILE    the measurements, as JSON; `rows` makes rows of them

A turn lasts from the driver's call until it has all sums: each worker adds up every byte that it got, on both sides. First all
get the whole batch, as tp x pp ranks do; then each a quarter of the rows, as dp ranks do. The pickle of the whole is made once.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.parts import Found
from benchmarks.peers import optional, verl, versions
from benchmarks.report import Row, beside
from benchmarks.timing import contest
from megappo.controller.colocate import create_colocated_worker
from megappo.controller.dispatch import Dispatch, dispatched
from megappo.controller.launch import join_world, launch_local
from megappo.controller.local_group import LocalWorkerGroup, serve
from megappo.controller.watchdog import Watchdog
from megappo.data.proto import DataProto

WORKERS, ROUNDS = 4, 11
SAMPLES, WIDTH = 1628, 2048  # 100 MB
GOAL = 20

Sums = dict[str, int]


def rows(found: Found) -> list[Row]:
    """The row of the table; for information the one where each worker gets its rows."""
    return [
        beside("batch_to_workers_vs_pickle", found["whole"], "verl", GOAL),
        beside("batch_rows_to_workers_vs_pickle", found["quarters"], "verl"),
    ]


def columns() -> dict[str, Tensor]:
    """What a PPO update reads, of a realistic kind: ids, masks, columns of floats."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(WIDTH // 4, WIDTH + 1, (SAMPLES, 1), generator=generator)
    mask = torch.arange(WIDTH) < lengths
    floats = ("old_log_probs", "ref_log_probs", "values", "advantages", "returns")
    return {
        "input_ids": torch.randint(0, 50_000, (SAMPLES, WIDTH), generator=generator) * mask,
        "attention_mask": mask,
        "response_mask": mask & (torch.arange(WIDTH) >= WIDTH // 8),
        **{name: torch.randn(SAMPLES, WIDTH, generator=generator) * mask for name in floats},
    }


def sums(tensors: Mapping[str, Tensor]) -> Sums:
    """Of all bytes, as whole numbers."""
    return {name: int(tensor.reshape(-1).view(torch.int64).sum()) for name, tensor in tensors.items()}


def quarters(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    size = SAMPLES // WORKERS
    return [{name: tensor[i * size : (i + 1) * size] for name, tensor in tensors.items()} for i in range(WORKERS)]


class Reader:
    """A worker of ours. known: what must arrive, from before the fork."""

    def __init__(self, known: Mapping[str, Tensor], number: int) -> None:
        self.known, self.number = known, number

    @dispatched(Dispatch.ALL)
    def read(self, tensors: dict[str, Tensor]) -> Sums:
        return sums(DataProto.from_dict(tensors).tensors())

    @dispatched(Dispatch.ALL)
    def check(self, tensors: dict[str, Tensor], is_whole: bool) -> bool:
        return same(tensors, self.known if is_whole else quarters(self.known)[self.number])


def same(got: Mapping[str, Tensor], known: Mapping[str, Tensor]) -> bool:
    return got.keys() == known.keys() and all(torch.equal(got[name], tensor) for name, tensor in known.items())


def read_pickles(pipe: Connection) -> None:
    """A worker of a framework that pickles."""
    torch.set_num_threads(1)
    while message := pipe.recv_bytes():
        pipe.send(sums(dict(pickle.loads(message).batch.items())))


class PicklingWorkers:
    """Four processes and a pipe to each."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes: list[Connection] = []
        for _ in range(WORKERS):
            ours, theirs = context.Pipe()
            context.Process(target=read_pickles, args=(theirs,), daemon=True).start()
            self.pipes.append(ours)

    def read(self, data: Any, whole: bool) -> list[Sums]:
        pickles = [pickle.dumps(data)] * WORKERS if whole else [pickle.dumps(part) for part in data.chunk(WORKERS)]
        for pipe, message in zip(self.pipes, pickles, strict=True):
            pipe.send_bytes(message)
        return [pipe.recv() for pipe in self.pipes]

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send_bytes(b"")


def measure(group: LocalWorkerGroup, theirs: Any, workers: PicklingWorkers, known: dict[str, Tensor]) -> Found:
    found: Found = {}
    batch = DataProto.from_dict(known)
    for name, whole in (("whole", True), ("quarters", False)):

        def ours(method: str, whole: bool = whole, **kwargs: bool) -> Any:
            tensors = batch.tensors()
            return group.call("reader", method, tensors if whole else quarters(tensors), **kwargs)

        assert all(ours("check", whole=whole, is_whole=whole)), "ours: a worker got something else"
        contestants: dict[str, Callable[[], Any]] = {"ours": functools.partial(ours, "read")}
        if theirs is not None:
            data = theirs.from_dict(tensors=known)
            assert same(dict(pickle.loads(pickle.dumps(data)).batch.items()), known), "verl: a pickle holds something else"
            contestants["peer"] = functools.partial(workers.read, data, whole)
        wanted = [sums(known)] * WORKERS if whole else [sums(part) for part in quarters(known)]
        for who, run in contestants.items():
            assert run() == wanted, f"{who}: a worker has read something else"
        found[name] = contest(contestants, ROUNDS)
    return found


def rank_main(run_dir: Path, file: Path, known: dict[str, Tensor], theirs: Any) -> int:
    """Rank 0 is the driver alone; the others are the workers."""
    rank, world_size, store = join_world(os.environ)
    workers = PicklingWorkers() if rank == 0 else None  # forked before there is a thread
    with Watchdog(store, rank, world_size, run_dir) as watchdog:
        worker = create_colocated_worker({"reader": Reader(known, rank - 1)} if rank else {})
        if workers is None:
            serve(worker, watchdog)
            return 0
        with LocalWorkerGroup({}, worker, watchdog, ranks={"reader": range(1, world_size)}) as group:
            found = measure(group, theirs, workers, known)
        workers.close()
        file.write_text(json.dumps(found | {"peers": versions}))
    return 0


def main(file: Path) -> int:
    torch.set_num_threads(1)
    known, theirs = columns(), optional(verl, verl.load_batch)
    with tempfile.TemporaryDirectory() as folder:
        return launch_local(1 + WORKERS, lambda: rank_main(Path(folder), file, known, theirs), folder)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
