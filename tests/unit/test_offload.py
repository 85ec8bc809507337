"""Do storages leave and come back whole, and does nothing move that need not? Plain tensors, bytes counted."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megappo.errors import RunFailed
from megappo.pp_weights import offload as offload_module
from megappo.pp_weights.offload import Kind, ModelMemory, _factors, content_sum, piece_sizes, require_memory

MB = 1 << 20


class Model:
    """Three parameters (two are views of one storage), a gradient buffer, and the state of an optimizer that steps a view."""

    def __init__(self, floats: int = 1000) -> None:
        generator = torch.Generator().manual_seed(3)
        self.both = torch.randn(floats, generator=generator)
        self.params = [
            torch.nn.Parameter(self.both[: floats // 2].view(2, -1)),
            torch.nn.Parameter(self.both[floats // 2 :]),
            torch.nn.Parameter(torch.randn(floats, generator=generator)),
        ]
        self.shard = self.params[0].detach()[0]
        self.grads = torch.ones(2 * floats)
        self.some_grads = self.grads[:5]
        self.state = [torch.randn(floats, generator=generator), torch.zeros(floats)]
        self.empty = torch.empty(0)

    def tensors(self, kind: Kind) -> list[Tensor]:
        if kind == "parameters":
            return [*self.params, self.empty]
        return [self.some_grads, self.grads] if kind == "gradients" else [self.shard, *self.state]

    @property
    def sizes(self) -> list[int]:
        return [t.untyped_storage().nbytes() for t in (self.both, self.params[2], self.grads, *self.state)]

    def values(self) -> list[Tensor]:
        return [t.detach().clone() for t in (*self.params, *self.state)]


def test_all_is_gone_after_an_off_load_and_whole_after_an_on_load() -> None:
    model = Model()
    memory, before = ModelMemory(model.tensors), model.values()
    moved = memory.offload("parameters", "gradients", "optimizer")
    assert model.sizes == [0] * 5
    # Two parameters of 1000 floats in all, one of 1000, two states of 1000, each once; the gradients without a copy.
    assert (moved.to_host_bytes, moved.dropped_bytes, moved.offloaded_bytes) == (16_000, 8_000, 24_000)
    moved = memory.onload("parameters", "gradients", "optimizer")
    assert (moved.to_device_bytes, moved.to_host_bytes) == (16_000, 0)
    assert model.sizes == [4000, 4000, 8000, 4000, 4000]
    assert all(torch.equal(a, b) for a, b in zip(before, model.values(), strict=True))
    assert model.params[0].untyped_storage()._cdata == model.both.untyped_storage()._cdata  # still one storage


def test_kinds_leave_and_come_back_by_themselves() -> None:
    model = Model()
    memory = ModelMemory(model.tensors)
    memory.offload("gradients")
    assert model.sizes == [4000, 4000, 0, 4000, 4000]
    memory.offload("optimizer")  # its view of a parameter is a parameter's storage
    assert model.sizes == [4000, 4000, 0, 0, 0]
    memory.offload("parameters")
    memory.onload("parameters")
    assert model.sizes == [4000, 4000, 0, 0, 0]
    memory.onload("parameters", "optimizer")
    assert memory.moved.to_device_bytes == 16_000
    assert model.sizes == [4000, 4000, 0, 4000, 4000]


def in_place(parameter: torch.nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


def through_data(parameter: torch.nn.Parameter, value: Tensor) -> None:
    parameter.data.copy_(value)  # leaves no mark: the parameter's version stays


def another_tensor(parameter: torch.nn.Parameter, value: Tensor) -> None:
    parameter.data = value.clone()


def one_byte(parameter: torch.nn.Parameter, value: Tensor) -> None:
    torch.empty(0, dtype=torch.uint8).set_(parameter.untyped_storage())[-1] ^= 1


@pytest.mark.parametrize("change", [in_place, through_data, another_tensor, one_byte])
def test_what_changed_is_copied_and_the_rest_is_not(change: Callable[[torch.nn.Parameter, Tensor], None]) -> None:
    model = Model()
    memory = ModelMemory(model.tensors)
    for _ in range(2):
        memory.offload("parameters")
        memory.onload("parameters")
    assert memory.moved.to_host_bytes == 8000  # the first time alone
    assert memory.moved.dropped_bytes == 8000
    change(model.params[2], torch.arange(1000.0))
    want = model.values()
    moved = memory.offload("parameters")
    assert (moved.to_host_bytes, moved.dropped_bytes) == (4000, 4000)
    memory.onload("parameters")
    assert all(torch.equal(a, b) for a, b in zip(want, model.values(), strict=True))


def test_a_parameter_that_is_set_while_the_others_are_away_keeps_its_value() -> None:
    model = Model()
    memory = ModelMemory(model.tensors)
    memory.offload("parameters")
    model.params[2].data = torch.full((1000,), 5.0)
    assert memory.offload("parameters").to_host_bytes == 4000
    memory.onload("parameters")
    assert torch.equal(model.params[2].detach(), torch.full((1000,), 5.0))


def test_what_will_be_loaded_anew_is_not_copied_back() -> None:
    model = Model()
    memory = ModelMemory(model.tensors)
    memory.offload("parameters")
    assert memory.onload("parameters", keep=False).to_device_bytes == 0
    in_place(model.params[2], torch.arange(1000.0))
    assert model.sizes[:2] == [4000, 4000]
    memory.offload("parameters")
    memory.onload("parameters")
    assert torch.equal(model.params[2].detach(), torch.arange(1000.0))


def test_inside_a_held_block_all_is_there_and_what_was_away_leaves_again_without_a_copy() -> None:
    model = Model()
    memory = ModelMemory(model.tensors)
    memory.offload("parameters")
    with memory.held("parameters", "optimizer"):
        assert 0 not in model.sizes
    assert model.sizes == [0, 0, 8000, 4000, 4000]
    assert memory.moved.to_host_bytes == 8000


def test_host_copies_are_reused_and_go_with_their_storage_before_a_new_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    memory = ModelMemory(model.tensors)
    made: list[weakref.ref[object]] = []
    alive: list[int] = []
    plain = offload_module._HostCopy.of_size

    def counting(num_bytes: int, pinned: bool) -> object:
        gc.collect()
        alive.append(sum(ref() is not None for ref in made))
        copy = plain(num_bytes, pinned)
        made.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(offload_module._HostCopy, "of_size", counting)
    for step in range(10):
        in_place(model.params[2], torch.full((1000,), float(step)))
        memory.offload("parameters")
        memory.onload("parameters")
    assert alive == [0, 1]
    model.params[2].data = torch.zeros(1000)
    memory.offload("parameters")
    assert alive == [0, 1, 1]  # the one of the shared storage


def test_never_more_than_one_storage_is_there_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(size) for size in (1000, 3000, 2000, 500)]
    memory = ModelMemory(lambda kind: tensors if kind == "parameters" else [])
    totals, on_host = [], [0]
    plain = offload_module._HostCopy.take

    def counting(self: offload_module._HostCopy, storage: torch.UntypedStorage, content: int) -> None:
        on_host[0] += self.num_bytes
        totals.append(on_host[0] + sum(t.untyped_storage().nbytes() for t in tensors))
        plain(self, storage, content)

    monkeypatch.setattr(offload_module._HostCopy, "take", counting)
    memory.offload("parameters")
    assert len(totals) == 4
    assert max(totals) == 4 * (6500 + 3000)  # the model and its largest storage


def test_the_system_gets_the_memory_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    grads = torch.ones(64 * MB // 4)
    memory = ModelMemory(lambda kind: [grads] if kind == "gradients" else [])
    before = resident()
    memory.offload("gradients")
    assert before - resident() > 60 * MB
    memory.onload("gradients")
    assert grads.zero_().sum() == 0


def test_an_off_loaded_tensor_is_named_and_a_view_into_the_middle_too() -> None:
    model = Model()
    require_memory([("a", model.params[0]), ("empty", model.empty)], "not loaded")
    ModelMemory(model.tensors).offload("parameters")
    assert model.params[1].data_ptr() != 0  # an offset from nowhere: no test for an off-loaded tensor
    with pytest.raises(RunFailed, match="not loaded: b is off-loaded; bring the parameters back first"):
        require_memory([("empty", model.empty), ("b", model.params[1])], "not loaded")


@given(data=st.binary(max_size=70))
@settings(deadline=None)
def test_the_sum_is_the_one_that_its_docstring_gives(data: bytes) -> None:
    factors = [int(f) for f in _factors(torch.device("cpu"))[:20]]
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data) // 4 * 4, 4)]
    total = sum(word * factor for word, factor in zip(words, factors, strict=False)) * factors[1]
    total += sum(byte * factor for byte, factor in zip(data[len(words) * 4 :], factors, strict=False))
    found = content_sum(torch.tensor(list(data), dtype=torch.uint8))
    assert int(found) % 2**64 == total % 2**64


def test_the_sum_sees_flipped_bits_swapped_words_swapped_blocks_and_signs() -> None:
    block = offload_module._BLOCK_WORDS * 4
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (3 * block + 7,), dtype=torch.uint8, generator=generator)
    seen = {int(content_sum(data))}
    swapped = torch.cat([data[block : 2 * block], data[:block], data[2 * block :]])
    signs = data.clone()
    signs[: 3 * block].view(torch.float32)[1:9:2].neg_()  # the highest bits of four 64-bit words
    words = data.clone()
    words[:4], words[4:8] = data[4:8], data[:4]
    flipped = [data.clone() for _ in range(3)]
    for copy, place in zip(flipped, (0, 2 * block + 5, len(data) - 1), strict=True):
        copy[place] ^= 128
    variants = [swapped, signs, words, *flipped]
    seen |= {int(content_sum(variant)) for variant in variants}
    assert len(seen) == 1 + len(variants)


@given(num_bytes=st.integers(0, 1 << 36))
def test_pieces_are_the_whole_and_waste_less_than_a_mebibyte(num_bytes: int) -> None:
    sizes = piece_sizes(num_bytes)
    assert sum(sizes) == num_bytes
    rounded = sum(1 << (size - 1).bit_length() for size in sizes)  # what page-locked memory takes
    assert num_bytes <= rounded < num_bytes + MB
