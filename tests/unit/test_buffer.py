"""Does every tensor lie where the manifest says, aligned, in shared memory that leaves nothing behind?"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.errors import RunFailed, UserError
from megappo.pp_weights.buffer import (
    WeightBuffer,
    build_memory_buffer,
    build_memory_reference,
    calc_padded_numel,
    weight_buffer_meta,
)
from megappo.pp_weights.manifest import ITEM_BYTES, Manifest, ManifestEntry, TensorMeta, build_manifest, fingerprint_of
from megappo.pp_weights.verify import NamesDiffer, checksum, checksums, compare_names, verify

F32, BF16, F64, FP8 = torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn
DTYPES = [F32, BF16, F64, FP8, torch.int8, torch.uint8, torch.int32, torch.bool]


@pytest.mark.parametrize(
    "shape, expected", [((1,), (4, 8, 2, 16)), ((3,), (4, 8, 4, 16)), ((9,), (12, 16, 10, 16)), ((5, 7), (36, 40, 36, 48))]
)
def test_padded_numel_fills_whole_128_bit_words(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert tuple(calc_padded_numel(shape, dtype) for dtype in (F32, BF16, F64, FP8)) == expected


def test_padded_numel_takes_integers_scalars_and_empty_tensors() -> None:
    assert calc_padded_numel((5,), torch.int32) == 8
    assert calc_padded_numel((), torch.int8) == 16
    assert calc_padded_numel((0, 7), F32) == 0
    assert calc_padded_numel((9,), BF16, alignment_bytes=256) == 128


@pytest.mark.parametrize("alignment", [0, 8, 24])
def test_an_alignment_that_is_not_a_multiple_of_16_is_refused(alignment: int) -> None:
    with pytest.raises(UserError, match=f"alignment_bytes={alignment} must be a multiple of 16"):
        calc_padded_numel((1,), F32, alignment)


def test_tensors_of_6_4_2_and_16_bytes_start_at_0_16_32_48() -> None:
    meta = {f"t{i}": TensorMeta((size,), torch.uint8) for i, size in enumerate((6, 4, 2, 16))}
    manifest = build_manifest(meta)
    assert [entry.offset for entry in manifest.entries] == [0, 16, 32, 48]
    assert manifest.total_bytes == 64


def test_layers_2_comes_before_layers_10() -> None:
    meta = {
        "layers.10.w": TensorMeta((3, 5), F32),
        "layers.2.w": TensorMeta((2, 2), F32),
        "a.w": TensorMeta((7,), F32),
        "layers.0.b": TensorMeta((3,), BF16),
        "layers.0.w": TensorMeta((4, 4), BF16),
    }
    entries = build_manifest(meta).entries
    assert [(e.name, e.offset) for e in entries] == [
        ("a.w", 0),
        ("layers.0.b", 32),
        ("layers.0.w", 48),
        ("layers.2.w", 80),
        ("layers.10.w", 96),
    ]


metas = st.dictionaries(
    st.text("abc.019", min_size=1, max_size=8),
    st.builds(TensorMeta, st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(DTYPES)),
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(metas, st.sampled_from([16, 256, 512]))
def test_any_mix_of_shapes_and_dtypes_round_trips(meta: dict[str, TensorMeta], alignment: int) -> None:
    buffer = build_memory_buffer(meta, alignment_bytes=alignment)
    generator = torch.Generator().manual_seed(0)
    written = {}
    for name, view in build_memory_reference(meta, buffer).items():
        assert view.shape == meta[name].shape and view.dtype == meta[name].dtype
        assert view.numel() == 0 or view.data_ptr() % alignment == 0
        raw = torch.randint(0, 2, (view.numel() * view.element_size(),), dtype=torch.uint8, generator=generator)
        written[name] = raw.view(view.dtype).reshape(view.shape)
        view.copy_(written[name])
    for name, view in buffer.views().items():  # nothing was written over by a neighbour
        assert view.reshape(-1).view(torch.uint8).tolist() == written[name].reshape(-1).view(torch.uint8).tolist()
    assert Manifest.from_json(buffer.manifest.to_json()) == buffer.manifest
    verify(buffer.manifest.stamped(3, checksums(buffer.views())), buffer.views())


def test_the_manifest_says_where_tensors_lie_whatever_its_order() -> None:
    meta = {"a": TensorMeta((3,), BF16), "b": TensorMeta((), F32), "c": TensorMeta((5,), BF16), "d": TensorMeta((1,), F32)}
    buffer = build_memory_buffer(meta)
    for number, view in enumerate(buffer.views().values(), start=1):
        view.fill_(number)
    shuffled = Manifest(buffer.manifest.entries[::-1], buffer.manifest.total_bytes)
    buffer.manifest = Manifest.from_json(shuffled.to_json())
    assert {name: view.float().unique().item() for name, view in buffer.views().items()} == {"a": 1, "b": 2, "c": 3, "d": 4}


def test_a_reference_of_another_shape_or_name_is_refused() -> None:
    buffer = build_memory_buffer({"a": TensorMeta((2, 3), F32)})
    with pytest.raises(ValueError, match=r"float32 \(2, 3\) under 'a', not torch.float32 \(3, 2\)"):
        build_memory_reference({"a": TensorMeta((3, 2), F32)}, buffer)
    with pytest.raises(ValueError, match="nothing under 'b'"):
        build_memory_reference({"b": TensorMeta((3, 2), F32)}, buffer)


@pytest.mark.parametrize(
    "entries, fault",
    [
        ([ManifestEntry("a", "float32", (4,), 0, 16), ManifestEntry("b", "float32", (4,), 0, 16)], "overlaps 'a'"),
        ([ManifestEntry("a", "float32", (4,), 0, 16), ManifestEntry("a", "float32", (4,), 16, 16)], "twice"),
        ([ManifestEntry("a", "float32", (5,), 0, 16)], "need 20"),
        ([ManifestEntry("a", "float32", (4,), 4, 16)], "not a multiple of 16"),
        ([ManifestEntry("a", "float32", (4,), 32, 16)], "past the buffer's 32 bytes"),
        ([ManifestEntry("a", "floatish", (4,), 0, 16)], "unknown dtype 'floatish'"),
        ([ManifestEntry("a", "float32", (4,), 0, 12, rows=(2, 5))], r"has no rows \(2, 5\)"),
        ([ManifestEntry("a", "float32", (), 0, 4, rows=(0, 1))], r"has no rows \(0, 1\)"),
        ([ManifestEntry("a", "float32", (4, 2), 0, 32, rows=(0, 2))], "need 16"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(entries: list[ManifestEntry], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        Manifest(tuple(entries), total_bytes=32)


def test_the_bytes_of_an_element_are_torchs_own_for_every_dtype() -> None:
    for name, size in ITEM_BYTES.items():
        assert getattr(torch, name).itemsize == size, name
    numbers = {str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}
    odd = {name for name in numbers - ITEM_BYTES.keys() if not name.startswith(("q", "bits", "uint", "int"))}
    assert odd == set()  # what is left out is sub-byte or quantised


def test_some_rows_of_a_tensor_lie_in_a_buffer_and_travel_as_such() -> None:
    meta = {"w": TensorMeta((5, 3), F32), "b": TensorMeta((4,), torch.int8)}
    manifest = build_manifest(meta, order=["w", "b"], rows={"w": (2, 4)})
    w, b = manifest.entries
    assert (w.shape, w.held_shape, w.num_bytes, w.offset, b.offset) == ((5, 3), (2, 3), 24, 0, 32)
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.table == {"w": ("float32", (5, 3)), "b": ("int8", (4,))}
    buffer = WeightBuffer.create(manifest)
    buffer.views()["w"].copy_(torch.arange(6.0).view(2, 3))
    verify(manifest.stamped(1, checksums(buffer.views())), buffer.views())
    assert build_memory_reference({"w": TensorMeta((2, 3), F32)}, buffer)["w"].tolist() == [[0, 1, 2], [3, 4, 5]]  # type: ignore[arg-type]
    buffer.close()


def test_the_fingerprint_does_not_depend_on_the_order_or_on_the_rows() -> None:
    meta = {"w": TensorMeta((5, 3), F32), "b": TensorMeta((4,), torch.int8)}
    whole = build_manifest(meta).fingerprint
    assert whole == build_manifest(meta, order=["b", "w"]).fingerprint == build_manifest(meta, rows={"w": (0, 2)}).fingerprint
    assert whole == fingerprint_of({"b": ("int8", (4,)), "w": ("float32", (5, 3))})


def test_the_fingerprint_changes_with_a_name_a_shape_or_a_dtype() -> None:
    prints = {
        build_manifest(meta).fingerprint
        for meta in (
            {"a": TensorMeta((2, 3), F32)},
            {"b": TensorMeta((2, 3), F32)},
            {"a": TensorMeta((3, 2), F32)},
            {"a": TensorMeta((2, 3), torch.int32)},
        )
    }
    assert len(prints) == 4


def test_the_meta_of_a_module_names_tied_parameters_once_and_buffers_too() -> None:
    module = torch.nn.Module()
    module.a = torch.nn.Linear(2, 3, bias=False)
    module.b = torch.nn.Linear(2, 3, bias=False)
    module.b.weight = module.a.weight
    module.register_buffer("count", torch.zeros((), dtype=torch.int64))
    assert weight_buffer_meta(module) == {"a.weight": TensorMeta((3, 2), F32), "count": TensorMeta((), torch.int64)}


def test_another_process_reads_the_buffer_through_its_path() -> None:
    manifest = build_manifest({"w": TensorMeta((2, 3), F32), "n": TensorMeta((), torch.int8)}, weight_version=4)
    buffer = WeightBuffer.create(manifest)
    buffer.views()["w"].copy_(torch.arange(6.0).reshape(2, 3))
    buffer.views()["n"].fill_(-7)
    code = (
        "import sys; from megappo.pp_weights.buffer import Manifest, WeightBuffer\n"
        "b = WeightBuffer.open(sys.argv[1], Manifest.from_json(sys.argv[2])); v = b.views()\n"
        "sys.stdout.write(f\"{v['w'].tolist()} {v['n'].item()} {b.manifest.weight_version}\")"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, buffer.path, manifest.to_json()], capture_output=True, text=True, timeout=60
    )
    buffer.close()
    assert (done.stdout, done.stderr) == ("[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] -7 4", "")


def test_what_one_side_writes_the_other_sees_and_a_closed_buffer_cannot_be_opened() -> None:
    manifest = build_manifest({"w": TensorMeta((4,), F32)})
    ours = WeightBuffer.create(manifest)
    writer, reader = WeightBuffer.open(ours.path, manifest, writable=True), WeightBuffer.open(ours.path, manifest)
    writer.views()["w"].fill_(5)
    assert reader.views()["w"].tolist() == [5.0] * 4
    ours.close()
    ours.close()
    assert reader.views()["w"].tolist() == [5.0] * 4  # a view keeps the memory
    with pytest.raises(RunFailed, match="cannot open the weight buffer"):
        WeightBuffer.open(ours.path, manifest)
    with pytest.raises(RunFailed, match="closed"):
        ours.views()


def test_a_buffer_that_is_smaller_than_its_manifest_is_refused() -> None:
    buffer = WeightBuffer.create(build_manifest({"w": TensorMeta((4,), F32)}))
    with pytest.raises(RunFailed, match="has 16 bytes; its manifest says 32"):
        WeightBuffer.open(buffer.path, build_manifest({"w": TensorMeta((8,), F32)}))
    buffer.close()


def test_a_buffer_larger_than_the_memory_is_refused_before_anything_is_written() -> None:
    with pytest.raises(UserError, match=r"of shared memory, .* are free"):
        WeightBuffer.create(build_manifest({"w": TensorMeta((1 << 45,), torch.uint8)}))


def test_an_empty_buffer_can_be_created_and_opened() -> None:
    manifest = build_manifest({"none": TensorMeta((0, 3), F32)})
    buffer = WeightBuffer.create(manifest)
    assert WeightBuffer.open(buffer.path, manifest).views()["none"].shape == (0, 3)
    buffer.close()


@pytest.mark.parametrize("bit", [0, 7, 8 * 4099, 8 * 300_001 + 3, 8 * 1_000_002 + 7])
def test_the_checksum_notices_one_flipped_bit(bit: int) -> None:
    data = torch.randint(0, 256, (1_000_003,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    before = checksum(data)
    data[bit // 8] ^= 1 << bit % 8
    assert checksum(data) != before


def test_the_checksum_notices_swapped_rows_and_blocks_and_dropped_zeros() -> None:
    data = torch.randn(64, 8192, generator=torch.Generator().manual_seed(2))
    rows = list(range(64))
    assert checksum(data) == checksum(data.clone())
    assert checksum(data) != checksum(data[[1, 0, *rows[2:]]])
    assert checksum(data) != checksum(data[rows[32:] + rows[:32]])  # whole blocks of the sum
    assert checksum(torch.zeros(8)) != checksum(torch.zeros(16))


def test_the_checksum_of_a_transposed_view_is_that_of_its_values() -> None:
    data = torch.randn(5, 3)
    assert checksum(data.t()) == checksum(data.t().contiguous()) != checksum(data)


def test_verify_names_the_damaged_tensor_and_refuses_unsummed_ones() -> None:
    buffer = build_memory_buffer({"a": TensorMeta((3,), F32), "b": TensorMeta((3,), F32)})
    with pytest.raises(RunFailed, match="without checksums"):
        verify(buffer.manifest, buffer.views())
    manifest = buffer.manifest.stamped(7, checksums(buffer.views()))
    buffer.views()["b"][1] = 1e-30
    with pytest.raises(RunFailed, match=r"version 7: bytes differ from what was published: b$"):
        verify(manifest, buffer.views())


def test_a_new_version_drops_the_old_checksums() -> None:
    manifest = build_manifest({"a": TensorMeta((3,), F32)}).stamped(1, {"a": 5})
    assert manifest.entries[0].checksum == 5
    assert manifest.stamped(2).entries[0].checksum is None


def test_differences_in_names_come_as_three_lists() -> None:
    expected = {"a": (1,), "b": (2,), "c": (3,)}
    with pytest.raises(NamesDiffer) as caught:
        compare_names(expected, {"a": (1,), "model.b": (2,), "c": (4,)})
    assert (caught.value.missing, caught.value.unexpected) == (["b"], ["model.b"])
    assert str(caught.value) == "weights: missing: b; unexpected: model.b; misshapen: c (4,), expected (3,)"
    compare_names(expected, {"a": (1,), "x": (2,), "c": (3,)}, allow_missing=("b",), allow_unexpected=("x",))
