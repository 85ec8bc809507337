"""Is this vLLM the one that was tried? Its signatures, the parameters of each request, and a reload that stops half-way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megappo.rollout.vllm_engine import child_environment
from tests.models import make_llama_folder

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]


def run_in_child(code: str, *arguments: str) -> dict[str, Any]:
    """Run code that imports vLLM in a process of its own (vLLM changes torch); its last line of output is JSON."""
    command = [sys.executable, "-c", code, *arguments]
    env = child_environment(os.environ, threads=1, device="cpu")
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


FACTS = """
import inspect, json, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams as VllmSamplingParams
import vllm.sampling_params
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from megappo.pp_weights.buffer import WeightBuffer, build_manifest, weight_buffer_meta
from megappo.rollout import vllm_adapter
from megappo.rollout.engine import SamplingParams

facts = {}
facts["reload_weights"] = list(inspect.signature(GPUModelRunner.reload_weights).parameters)
facts["add_request"] = list(inspect.signature(LLMEngine.add_request).parameters)[:4]
facts["LLM"] = sorted(inspect.signature(LLM.__init__).parameters)

stated = {}
sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=-1, max_new_tokens=5, stop_token_ids=(2, 3))
import vllm
vllm.SamplingParams, original = lambda **fields: stated.update(fields), vllm.SamplingParams
vllm_adapter.request_params(sampling)
vllm.SamplingParams = original
facts["public_fields"] = sorted(f for f in VllmSamplingParams.__struct_fields__ if not f.startswith("_"))
facts["stated"] = {name: repr(value) for name, value in stated.items()}

folder = sys.argv[1]
llm = vllm_adapter.start(vllm_adapter.VllmSettings(folder, "float32", 1, 64, 8, 32 << 20, 0.4, "cpu"))
expected = vllm_adapter.expected_weights(llm)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
named = dict(model.named_parameters())
facts["expected"] = sorted((name, list(shape)) for name, shape in expected.items())
facts["transformers"] = sorted((name, list(p.shape)) for name, p in named.items())

whole = WeightBuffer.views

def publish(received=whole):
    buffer = WeightBuffer.create(build_manifest(weight_buffer_meta(named)))
    for name, view in whole(buffer).items():
        view.copy_(named[name])
    WeightBuffer.views = received  # what vLLM's side sees
    vllm_adapter.update(llm, expected, buffer.path, buffer.manifest, False)

def greedy_matches():
    prompt = list(range(10, 50))
    tokens = vllm_adapter.generate(llm, [prompt], SamplingParams(0.0, 1.0, -1, 8, ()), [0])[0][0]
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return tokens == logits.argmax(-1).tolist()

publish()
facts["greedy_before"] = greedy_matches()

class HalfOfThem(dict):
    def items(self):
        for name, tensor in super().items():
            if name == "model.layers.2.mlp.up_proj.weight":  # in the middle of a fused layer: its gate has arrived
                raise OSError("the buffer is gone")
            yield name, tensor

for parameter in named.values():
    parameter.mul_(1.3)
try:
    publish(lambda self: HalfOfThem(whole(self)))
    facts["half"] = "no error"
except OSError as error:
    facts["half"] = str(error)
facts["greedy_half"] = greedy_matches()
for parameter in named.values():
    parameter.mul_(0.8)
publish()
facts["greedy_repaired"] = greedy_matches()
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    return run_in_child(FACTS, str(make_llama_folder(tmp_path_factory.mktemp("model"), tied=False)))


def test_signatures_are_those_that_were_tried(facts: Mapping[str, Any]) -> None:
    assert facts["reload_weights"] == ["self", "weights_iterator", "weights_path", "is_checkpoint_format"]
    assert facts["add_request"] == ["self", "request_id", "prompt", "params"]
    used = {"model", "skip_tokenizer_init", "dtype", "seed", "tensor_parallel_size", "enforce_eager", "kv_cache_memory_bytes"}
    assert used <= set(facts["LLM"])


def test_every_sampling_parameter_is_stated(facts: Mapping[str, Any]) -> None:
    assert sorted(facts["stated"]) == facts["public_fields"]


def test_what_the_user_does_not_set_is_neutral(facts: Mapping[str, Any]) -> None:
    stated = facts["stated"]
    assert {name: stated[name] for name in ("temperature", "top_p", "top_k", "max_tokens", "stop_token_ids")} == {
        "temperature": "0.7",
        "top_p": "0.9",
        "top_k": "0",
        "max_tokens": "5",
        "stop_token_ids": "[2, 3]",
    }
    neutral = {"n": "1", "min_p": "0.0", "min_tokens": "0", "repetition_penalty": "1.0", "presence_penalty": "0.0"}
    neutral |= {"frequency_penalty": "0.0", "logit_bias": "None", "bad_words": "None", "stop": "None", "ignore_eos": "True"}
    assert {name: stated[name] for name in neutral} == neutral


def test_the_names_and_shapes_vllm_expects_are_those_of_transformers(facts: Mapping[str, Any]) -> None:
    assert facts["expected"] == facts["transformers"]
    assert len(facts["expected"]) == 4 * 9 + 3


def test_a_reload_that_stops_half_way_is_repaired_by_the_next(facts: Mapping[str, Any]) -> None:
    assert facts["greedy_before"] is True
    assert facts["half"] == "the buffer is gone"
    assert facts["greedy_half"] is False  # so that the last line means something
    assert facts["greedy_repaired"] is True
