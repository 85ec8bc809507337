"""How does an unmodified megatron-core run without CUDA? `install()` answers the CUDA calls that it makes.

megatron-core writes CUDA into its code: `torch.cuda.current_device()` as the device of new tensors, `device="cuda"` in factory
calls, streams, CUDA generators, the type string 'torch.cuda.FloatTensor'. Each is answered here with its CPU equivalent, and our
Adam stands where apex's would be; nothing of megatron's own logic is replaced. Off where CUDA is there (`install` refuses), and
never needed by users.
Decision: docs/decisions/001-megatron-on-cpu.md.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megappo.parallel_state.cpu_adam import FusedAdam

_MODULES_WITH_CUDA_LITERALS = (
    "megatron.core.pipeline_parallel.schedules",  # token counter of each pass
    "megatron.core.optimizer.clip_grads",  # norm and overflow buffers
    "megatron.core.optimizer.optimizer",  # loss scale, found_inf
    "megatron.core.optimizer.grad_scaler",  # loss scale
    "megatron.core.distributed.param_and_grad_buffer",  # a warm-up tensor
    "megatron.core.utils",  # the gradient norm without apex
)
_FACTORIES = ("zeros", "ones", "empty", "full", "tensor", "arange")
_CPU_TYPE_NAMES = {
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.HalfTensor": "torch.cuda.HalfTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}
_installed = False


def install() -> None:
    """Answer megatron-core's CUDA calls on this process' CPU. Idempotent. Raises RuntimeError where CUDA is available."""
    global _installed
    if torch.cuda.is_available():
        raise RuntimeError("cpu_megatron.install() was called on a machine with CUDA; megatron-core needs no help there")
    if _installed:
        return
    # Where megatron was imported with its small functions decorated for compilation, they run as they are: compiling on a CPU
    # needs a compiler and minutes.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.config.disable = True
    _answer_device_calls()
    _answer_generator_calls()
    _answer_type_names()
    for name in _MODULES_WITH_CUDA_LITERALS:
        module: Any = importlib.import_module(name)
        module.torch = _TorchOnCpu("torch")
    _put_fused_adam_in_place()
    _define_missing_te_symbol()
    _installed = True


class _InertStream:
    """A stream or event on a device that runs everything in order: waiting on it is always done."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def record_event(self, *args: object) -> _InertStream:
        return self

    def _nothing(self, *args: object) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = _nothing


@contextlib.contextmanager
def _inert_stream_context(*args: object) -> Iterator[None]:
    yield


def _answer_device_calls() -> None:
    cuda: Any = torch.cuda
    cpu = torch.device("cpu")
    cuda.current_device = lambda: cpu  # megatron passes it as `device=` of new tensors
    for name in (
        "synchronize",
        "empty_cache",
        "set_device",
    ):  # nothing to wait for or choose; a function each, dynamo asks for that
        setattr(cuda, name, _make_nothing())
    cuda.Stream = cuda.Event = _InertStream  # DDP's and the schedules' communication streams
    cuda.current_stream = lambda *args: _InertStream()
    cuda.default_stream = lambda *args: _InertStream()
    cuda.stream = _inert_stream_context
    cuda.get_device_properties = lambda *args: types.SimpleNamespace(multi_processor_count=1)
    tensor_class: Any = torch.Tensor
    module_class: Any = torch.nn.Module
    tensor_class.cuda = lambda self, *args, **kwargs: self
    module_class.cuda = lambda self, *args, **kwargs: self


def _make_nothing() -> Callable[..., None]:
    return lambda *args, **kwargs: None


def _answer_generator_calls() -> None:
    """The RNG tracker forks "CUDA" states: they are the CPU generator's here."""
    cuda: Any = torch.cuda

    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    for namespace in (cuda, cuda.random):
        namespace.get_rng_state = get_rng_state
        namespace.set_rng_state = set_rng_state
        namespace.manual_seed = manual_seed
    cuda.default_generators = (torch.default_generator,)
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()


def _answer_type_names() -> None:
    """clip_grads, Float16Optimizer and the distributed optimizer compare `tensor.type()` with CUDA's type names."""
    tensor_class: Any = torch.Tensor
    plain_type = tensor_class.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = plain_type(self, *args, **kwargs)
        return _CPU_TYPE_NAMES.get(answer, answer) if isinstance(answer, str) else answer

    tensor_class.type = type_name


class _TorchOnCpu(types.ModuleType):
    """`torch` as the modules above see it: factory calls with device="cuda" make CPU tensors. Costs nothing elsewhere."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        if name in _FACTORIES:
            value = _with_device_on_cpu(value)
        setattr(self, name, value)  # looked up once
        return value


def _with_device_on_cpu(factory: Any) -> Any:
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return on_cpu


def _put_fused_adam_in_place() -> None:
    """Where apex would be: the class and the flags that say which kind of Adam it is."""
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    optimizer.Adam = distributed.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True


def _define_missing_te_symbol() -> None:
    """moe_utils (0.16.1) reads `te_general_gemm` although only TransformerEngine's import defines it."""
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
