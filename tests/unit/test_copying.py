"""Do `Copies` copy exactly the bytes that torch would, whatever the strides, and none where there is nothing to copy?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.pp_weights.copying import Copies, _block

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.int64, torch.bool]


def numbered(num_bytes: int, shift: int) -> torch.Tensor:
    """Room that starts at any address, not only at an aligned one."""
    return (torch.arange(shift + num_bytes) % 251).to(torch.uint8)[shift:].clone()


@st.composite
def views(draw: st.DrawFn) -> tuple[list[int], torch.dtype, list[int], list[int], int, int]:
    """(shape, dtype, order of dimensions and padding on either side, shifts of the addresses in elements)"""
    shape = draw(st.lists(st.integers(0, 20) | st.integers(60, 70), min_size=0, max_size=3))
    order = draw(st.permutations(range(len(shape))))
    padding = draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))
    return shape, draw(st.sampled_from(DTYPES)), list(order), padding, draw(st.integers(0, 40)), draw(st.integers(0, 40))


def strided(shape: list[int], dtype: torch.dtype, order: list[int], padding: list[int], shift: int, fill: bool) -> torch.Tensor:
    """A view of the shape, with dimensions in another order in memory and gaps between them."""
    sizes = [shape[axis] + padding[axis] for axis in order]
    count = 1
    for size in sizes:
        count *= size
    raw = (
        numbered((count + shift) * dtype.itemsize, 0)
        if fill
        else torch.zeros((count + shift) * dtype.itemsize, dtype=torch.uint8)
    )
    if dtype is torch.bool:
        raw %= 2
    room = raw.view(dtype)[shift:].view(sizes) if count + shift else raw.view(dtype).view(sizes)
    back = [order.index(axis) for axis in range(len(shape))]
    view = room.permute(back) if shape else room.reshape(())
    return view[tuple(slice(0, size) for size in shape)] if shape else view


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


@settings(max_examples=200, deadline=None)
@given(views(), st.booleans())
def test_every_pair_is_copied_as_torch_copies_it(drawn: tuple, as_memory: bool) -> None:
    shape, dtype, order, padding, shift_to, shift_of = drawn
    of = strided(shape, dtype, order, padding, shift_of, fill=True)
    to = strided(shape, dtype, order if as_memory else list(range(len(shape))), padding, shift_to, fill=False)
    found = raw_bytes(to)
    wanted = found.clone()
    integer = torch.uint8 if dtype.itemsize == 1 else dtype  # torch copies float8 and bool by value
    like = torch.empty(0, dtype=integer).set_(wanted.untyped_storage(), to.storage_offset(), to.shape, to.stride())
    like.copy_(of.view(integer))
    copies = Copies([(to, of)])
    copies.run()
    assert torch.equal(found, wanted)  # the gaps, too
    assert copies.copied_bytes == of.nbytes


def test_rows_and_columns_of_matrices_are_blocks_and_three_strides_are_torchs() -> None:
    matrix = torch.zeros(8, 6, 4)
    assert _block(matrix[:, 1:3].clone(), matrix[:, 1:3]) is not None
    assert _block(torch.zeros(8, 6), matrix[:, :, 0]) is not None
    assert _block(torch.zeros(8, 3, 2), matrix[:, ::2, ::2]) is None
    copies = Copies([(torch.zeros(8, 3, 2), matrix[:, ::2, ::2].add(1).expand(8, 3, 2))])
    copies.run()
    assert bool((copies._pairs[0][0] == 1).all())


def test_what_is_the_same_bytes_on_both_sides_is_not_copied() -> None:
    buffer = torch.arange(12.0)
    copies = Copies([(buffer[:4], buffer[:4]), (buffer[4:8], torch.ones(4)), (buffer[8:8], torch.empty(0))])
    assert copies.copied_bytes == 16
    copies.run()
    assert buffer.tolist() == [0, 1, 2, 3, 1, 1, 1, 1, 8, 9, 10, 11]


def test_other_dtypes_and_shapes_are_torchs() -> None:
    to, of = torch.zeros(4, dtype=torch.bfloat16), torch.arange(4.0)
    copies = Copies([(to, of)])
    copies.run()
    assert to.tolist() == [0, 1, 2, 3]
    with pytest.raises(RuntimeError):
        Copies([(torch.zeros(3), torch.zeros(4))]).run()


def test_a_long_run_after_the_sources_changed_copies_the_new_values() -> None:
    sources = [torch.full((1000 + i,), i, dtype=torch.uint8) for i in range(50)]
    to = torch.zeros(sum(s.numel() for s in sources), dtype=torch.uint8)
    copies = Copies(zip(to.split([s.numel() for s in sources]), sources, strict=True))
    for version in range(3):
        for source in sources:
            source += 1
        copies.run()
        assert torch.equal(to, torch.cat(sources)), version
