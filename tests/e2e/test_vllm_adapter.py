"""Is this vLLM the one that was tried, and does it take weights as we say? In its own process: one start for all of it."""

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
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


FACTS = """
import inspect, json, sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
import vllm
from vllm import LLM, SamplingParams as VllmSamplingParams
from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine, WeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import pack_tensors, unpack_tensor
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from megappo.models.families import shape_of
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.buffer import WeightBuffer, weight_buffer_meta
from megappo.pp_weights.manager import WeightManager
from megappo.pp_weights.manifest import build_manifest
from megappo.pp_weights.update import Update
from megappo.rollout import vllm_adapter, vllm_drive, vllm_fill
from megappo.rollout.engine import SamplingParams
from megappo.rollout.vllm_drive import Updates
from megappo.rollout.vllm_source import PublishedWeights
from tests.buckets import cut, in_models_order, send
from tests.fake_chunks import rank_chunks
from tests.unit.test_manager import OneRank

facts = {}
facts["reload_weights"] = list(inspect.signature(GPUModelRunner.reload_weights).parameters)
facts["add_request"] = list(inspect.signature(LLMEngine.add_request).parameters)[:4]
facts["LLM"] = sorted(inspect.signature(LLM.__init__).parameters)
facts["update_weights"] = list(inspect.signature(Worker.update_weights).parameters)

stated = {}
sampling = SamplingParams(temperature=0.7, top_p=0.9, top_k=-1, max_new_tokens=5, stop_token_ids=(2, 3))
vllm.SamplingParams, original = lambda **fields: stated.update(fields), vllm.SamplingParams
vllm_adapter.request_params(sampling)
vllm.SamplingParams = original
facts["public_fields"] = sorted(f for f in VllmSamplingParams.__struct_fields__ if not f.startswith("_"))
facts["stated"] = {name: repr(value) for name, value in stated.items()}

folder = sys.argv[1]
greedy = SamplingParams(0.0, 1.0, -1, 8, ())
prompt = list(range(10, 50))
llm = vllm_adapter.start(vllm_adapter.VllmSettings(folder, "float32", 1, 64, 8, 32 << 20, 0.4, "cpu"))
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
named = dict(model.named_parameters())
num_bytes = sum(p.nbytes for p in named.values())
version = 0


def greedy_matches():
    tokens = vllm_adapter.generate(llm, [prompt], greedy, [0])[0][0]
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return tokens == logits.argmax(-1).tolist()


class Child:
    # The engine's child without its socket: `Receiver` on one side, `Updates` on the other.
    def __init__(self, updates):
        self.updates = updates
    def start(self, update):
        self.updates.start(update)
    def settle(self):
        pass
    def load(self, bucket):
        self.updates.load([(path, m.to_json()) for path, m in zip(bucket.paths, bucket.manifests)])
    def finish(self):
        self.cloned_bytes = self.updates.finish()


def change(factor):
    generator = torch.Generator().manual_seed(int(factor * 100))
    for parameter in named.values():
        parameter.mul_(factor).add_(0.05 * torch.randn(parameter.shape, generator=generator))


def update(child, bucket_bytes, **options):
    global version
    version += 1
    try:
        send(child, named, version, bucket_bytes=bucket_bytes, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return greedy_matches()


def poison():
    # The KV cache as weights that were half loaded into fresh memory can leave it.
    for cache in llm.collective_rpc(lambda wrapper: wrapper.worker.model_runner.kv_caches)[0]:
        cache.fill_(float("nan"))


def faults(child):
    # A load that stops in a fused layer, its gate loaded; then a repair; then buckets that are not what was announced.
    found = {}
    change(1.1)
    facts["chosen"] = facts.get("chosen", []) + [type(child.updates._calls).__name__]
    found["first"] = update(child, 1 << 20)
    real = vllm_fill.LayerwiseFiller.put, vllm_fill.ReloadFiller.put
    def half(put):
        def stops(filler, tensors, views):
            def some():
                for name, tensor in tensors:
                    if name == "model.layers.2.mlp.up_proj.weight":
                        raise OSError("the buffer is gone")
                    yield name, tensor
            return put(filler, some(), views)
        return stops
    change(1.3)
    vllm_fill.LayerwiseFiller.put, vllm_fill.ReloadFiller.put = map(half, real)
    found["half"] = update(child, 1 << 20)
    vllm_fill.LayerwiseFiller.put, vllm_fill.ReloadFiller.put = real
    poison()
    try:
        found["greedy_half"] = greedy_matches()
    except Exception as error:
        found["greedy_half"] = str(error)
    poison()  # as an answer without that check would have
    change(0.8)
    found["repaired"] = update(child, 1 << 20)
    found["missing"] = update(child, 8192, edit=lambda buckets: buckets[:-1])
    found["order"] = update(child, 2048, edit=lambda buckets: [buckets[1], buckets[0], *buckets[2:]])
    found["twice"] = update(child, 8192, edit=lambda buckets: [*buckets, buckets[-1]])
    found["again"] = update(child, 1 << 20)
    return found


facts["expected"] = sorted((name, list(shape)) for name, shape in Updates(llm, 1, False).expected.items())
facts["transformers"] = sorted((name, list(p.shape)) for name, p in named.items())

stock = Child(Updates(llm, 1, False))
facts["stock"] = faults(stock)
facts["weight_version"] = [llm.get_weight_version(), str(version)]

# Tiny buckets, in slots that are overwritten as soon as they may be.
for bucket_bytes in (2048, 20000):
    change(1.05)
    facts[f"buckets_{bucket_bytes}"] = [len(cut(named, bucket_bytes)), update(stock, bucket_bytes)]
    facts[f"cloned_{bucket_bytes}"] = stock.cloned_bytes / num_bytes
vllm_fill.clone_held, real = lambda model, views: 0, vllm_fill.clone_held
change(1.05)
facts["without_clones"] = update(stock, 20000)
vllm_fill.clone_held = real
facts["with_clones"] = update(stock, 20000)

# An update that the trainer gives up, another while requests run, and a generate call that fails.
stock.start_only = lambda u: (stock.updates.start(u), (_ for _ in ()).throw(OSError("given up")))
start, stock.start = stock.start, stock.start_only
facts["given_up"] = update(stock, 1 << 20)
stock.start = start
facts["after_given_up"] = update(stock, 1 << 20)
engine = llm.llm_engine
engine.add_request("x", {"type": "token", "prompt_token_ids": prompt}, vllm_adapter.request_params(greedy))
facts["while_running"] = update(stock, 1 << 20)
engine.abort_request(["x"])
engine.step, step = lambda: 1 / 0, engine.step
try:
    vllm_adapter.generate(llm, [prompt, prompt], greedy, [0, 0])
except ZeroDivisionError:
    facts["left_running"] = engine.has_unfinished_requests()
engine.step = step
facts["after_failed_generate"] = update(stock, 1 << 20)

# The same through reload_weights, as where vLLM has no weight-transfer API.
def transfer_engine(make):
    worker = llm.collective_rpc(lambda wrapper: wrapper.worker)[0]
    was, worker.weight_transfer_engine = worker.weight_transfer_engine, make(worker)
    return was

own = transfer_engine(lambda worker: None)
vllm_drive.offers_weight_transfer = lambda: False
reload = Child(Updates(llm, 1, False))
facts["reload"] = faults(reload)
change(1.1)
facts["reload_buckets"] = [update(reload, 20000), reload.cloned_bytes / num_bytes]

# vLLM's own way from the trainer's side: a plain trainer engine over our WeightSource, a plain worker engine.
class PlainWorker(WeightTransferEngine):
    init_info_cls = update_info_cls = dict
    def parse_update_info(self, fields):
        return fields
    def init_transfer_engine(self, info):
        pass
    def start_weight_update(self):
        initialize_layerwise_reload(self.model)
    def receive_weights(self, c):
        self.model.load_weights(unpack_tensor(c["packed"].clone(), c["names"], c["shapes"], c["dtypes"], c["sizes"]))
    def finish_weight_update(self):
        finalize_layerwise_reload(self.model, self.model_config)
    def shutdown(self):
        pass

class PlainTrainer(TrainerWeightTransferEngine):
    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        return cls(client=client, source=source)
    def send_weights(self):
        self.client.start_weight_update()
        tensors = iter(self.source)
        while (chunk := pack_tensors(tensors, lambda item: item[1], 20000)) is not None:
            fields = {"packed": chunk.packed_tensor, "names": chunk.names, "shapes": chunk.shapes, "dtypes": chunk.dtypes}
            self.client.update_weights({"update_info": fields | {"sizes": chunk.tensor_sizes}})
        self.client.finish_weight_update()

transfer_engine(lambda worker: PlainWorker(own.config, worker.vllm_config, worker.device, own.model))
for mode in ("full", "bucketed"):
    change(1.05)
    shape, layout = shape_of(folder, head="lm"), ParallelLayout(4)
    chunks = rank_chunks(shape, layout, 0, {name: p.clone() for name, p in named.items()})
    manager = WeightManager(chunks, shape, OneRank(layout), is_active=lambda: True, mode=mode, bucket_bytes=20000)
    source = PublishedWeights(manager, lambda: 5)
    meta = [(m.name, m.dtype, m.shape) for m in source.metadata()]
    facts[f"source_{mode}"] = {
        "metadata_agrees": meta == [(n, t.dtype, tuple(t.shape)) for n, t in source],
        "groups": [names for names, _ in source.iter_groups()] == source.groups() and len(source.groups()),
        "held": source.held_names(),
    }
    PlainTrainer.trainer_init(None, client=llm, source=source).send_weights()
    llm.reset_prefix_cache()
    facts[f"source_{mode}"]["greedy"] = greedy_matches()
    manager.close()

# Zero copy: the linears as they are where `use_plain_linears` is called before the start.
vllm_fill.use_plain_linears()
for module in own.model.modules():
    if hasattr(module, "cpu_linear"):
        layer_utils.dispatch_cpu_unquantized_gemm(module, remove_weight=True)

class NewMemory(TorchDispatchMode):
    # Bytes of every storage that an operation gave and that was not there before.
    def __init__(self):
        super().__init__()
        self.storages = {}
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.storages[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
        return out

def engine_parameters():
    return dict(llm.collective_rpc(lambda wrapper: list(wrapper.worker.model_runner.get_model().named_parameters()))[0])

transfer_engine(lambda worker: own)
vllm_drive.offers_weight_transfer = lambda: True
alias = Updates(llm, 1, True)
found, buffers = facts.setdefault("alias", []), []
for factor in (1.1, 1.05):
    change(factor)
    version += 1
    meta, order = weight_buffer_meta(named), in_models_order(named)
    buffers.append(WeightBuffer.create(build_manifest(meta, order=order, weight_version=version)))
    for name, view in buffers[-1].views().items():
        view.copy_(named[name])
    manifest = buffers[-1].manifest
    with NewMemory() as memory:
        alias.start(Update(version, manifest.table, manifest.fingerprint, 1))
        alias.load([(buffers[-1].path, manifest.to_json())])
        cloned = alias.finish()
    storages = {p.untyped_storage().data_ptr() for p in engine_parameters().values()}
    own = sum(size for pointer, size in memory.storages.items() if pointer not in storages)
    found.append({"greedy": greedy_matches(), "storages": len(storages), "own_bytes": own, "cloned": cloned})
buffers[0].data.fill_(171)
facts["alias_old_slot_free"] = greedy_matches()
buffers[1].data.fill_(171)
facts["alias_reads_in_place"] = all(p.view(torch.uint8).eq(171).all().item() for p in engine_parameters().values())
facts["alias_gap"] = []
manifest = build_manifest(weight_buffer_meta(named), weight_version=version + 1)  # natural order: k before q
gapped = WeightBuffer.create(manifest)
alias.start(Update(version + 1, manifest.table, manifest.fingerprint, 1))
alias.load([(gapped.path, manifest.to_json())])
try:
    alias.finish()
except Exception as error:
    facts["alias_gap"] = str(error)
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


@pytest.mark.parametrize("path, chosen", [("stock", "TransferCalls"), ("reload", "ExtensionCalls")])
def test_an_update_that_goes_wrong_is_repaired_by_the_next(facts: Mapping[str, Any], path: str, chosen: str) -> None:
    """Through vLLM's weight-transfer API, and as in a vLLM without it."""
    found = facts[path]
    assert chosen in facts["chosen"]
    assert found["first"] is True
    assert found["half"] == "RunFailed: OSError: the buffer is gone"
    assert found["greedy_half"].startswith("vLLM answered prompt 0 of 1 with log-probs that are not finite")
    assert found["repaired"] is True
    assert "missing: model.norm.weight" in found["missing"]
    assert "came, expected row 0" in found["order"]
    assert "model.norm.weight came twice" in found["twice"]
    assert found["again"] is True


def test_vllm_knows_the_version_that_it_holds(facts: Mapping[str, Any]) -> None:
    held, sent = facts["weight_version"]
    assert held == sent


def test_buckets_may_be_overwritten_once_they_are_read(facts: Mapping[str, Any]) -> None:
    """Layers that are not complete hold on to what has come; of that, and no more, there must be copies."""
    assert facts["buckets_2048"][0] > 200 and facts["buckets_2048"][1] is True
    assert facts["buckets_20000"][0] > 20 and facts["buckets_20000"][1] is True
    assert facts["without_clones"] is False  # so that this can fail
    assert facts["with_clones"] is True
    assert 0 < facts["cloned_20000"] < 0.5


def test_an_update_is_refused_while_requests_run_and_follows_one_that_was_given_up(facts: Mapping[str, Any]) -> None:
    assert facts["given_up"] == "OSError: given up"
    assert facts["after_given_up"] is True
    assert "requests are running; update between generate calls" in facts["while_running"]
    assert facts["left_running"] is False
    assert facts["after_failed_generate"] is True


def test_without_the_weight_transfer_api_buckets_are_reloaded_at_the_end(facts: Mapping[str, Any]) -> None:
    """Those before the last are kept until then."""
    greedy, copied = facts["reload_buckets"]
    assert greedy is True
    assert 0.9 < copied < 1


@pytest.mark.parametrize("mode", ["full", "bucketed"])
def test_vllms_own_sender_fills_a_vllm_from_our_source(facts: Mapping[str, Any], mode: str) -> None:
    """Also that what the source declares is what it yields, in the groups that vLLM derives: 4 layers, before and after them."""
    assert facts[f"source_{mode}"] == {"metadata_agrees": True, "groups": 6, "held": None, "greedy": True}


def test_zero_copy_leaves_the_engine_without_memory_of_its_own_for_weights(facts: Mapping[str, Any]) -> None:
    """Every parameter lies in the one buffer, and no operation of an update makes as much as the smallest weight."""
    assert [found["greedy"] for found in facts["alias"]] == [True, True]
    assert [found["storages"] for found in facts["alias"]] == [1, 1]
    assert all(found["own_bytes"] < 64 * 4 and found["cloned"] == 0 for found in facts["alias"])
    assert facts["alias_old_slot_free"] is True
    assert facts["alias_reads_in_place"] is True
    assert "does not follow" in facts["alias_gap"] and "without a gap" in facts["alias_gap"]
