"""Does an `Assembler` give complete tensors out of buckets, and refuse whatever else comes?"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megappo.errors import RunFailed
from megappo.models.shape import ModelShape
from megappo.parallel_state.layout import ParallelLayout
from megappo.pp_weights.assemble import Assembler, deliver
from megappo.pp_weights.buffer import MemoryBuffer, WeightBuffer, views_of
from megappo.pp_weights.manifest import Manifest, build_manifest
from megappo.pp_weights.plan import TransferPlan, build_plan
from megappo.pp_weights.update import Bucket, Receivers, Update
from megappo.pp_weights.verify import NamesDiffer, checksums
from tests.fake_chunks import make_shape, stamped_hf

SHAPE = make_shape(layers=2)


def plan_of(shape: ModelShape, bucket_bytes: int | None, alignment_bytes: int = 16) -> TransferPlan:
    dtypes = dict.fromkeys(stamped_hf(shape), "float32")
    return build_plan(shape, ParallelLayout(shape.num_layers), dtypes, bucket_bytes=bucket_bytes, alignment_bytes=alignment_bytes)


def filled(plan: TransferPlan, hf: dict[str, torch.Tensor], version: int = 1) -> list[MemoryBuffer]:
    """Every bucket with its part of the tensors, checksummed."""
    buffers = []
    for manifest in plan.targets[0].buckets:
        data = torch.zeros(manifest.total_bytes, dtype=torch.uint8)
        views = views_of(data, manifest)
        for entry in manifest.entries:
            views[entry.name].copy_(hf[entry.name] if entry.rows is None else hf[entry.name][slice(*entry.rows)])
        buffers.append(MemoryBuffer(manifest.stamped(version, checksums(views)), data))
    return buffers


def update_of(plan: TransferPlan, verify: bool = True) -> Update:
    return Update(1, plan.table, plan.fingerprint, plan.num_buckets, verify=verify)


def assembled(
    plan: TransferPlan, buffers: list[MemoryBuffer], update: Update | None = None, keep: bool = False
) -> dict[str, torch.Tensor]:
    assembler = Assembler(update or update_of(plan), keep)
    found = {}
    for buffer in buffers:
        for name, tensor in assembler.tensors(buffer.manifest, buffer.views()):
            found[name] = tensor.clone()
    assembler.finish()
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6000),
    st.sampled_from([16, 64, 256]),
    st.booleans(),
    st.sampled_from([(4, 4), (4, 2), (4, 1), (6, 3)]),
    st.integers(1, 70),
)
def test_whatever_the_bucket_size_the_tensors_come_out_whole(
    bucket_bytes: int, alignment: int, tied: bool, heads: tuple[int, int], vocab: int
) -> None:
    shape = make_shape(layers=2, heads=heads[0], kv_heads=heads[1], tied=tied, vocab=vocab)
    hf = stamped_hf(shape)
    plan = plan_of(shape, bucket_bytes, alignment)
    found = assembled(plan, filled(plan, hf), keep=bool(vocab % 2))
    assert list(found) == list(plan.table)
    assert all(torch.equal(found[name], hf[name]) for name in hf)
    row = max(4 * tensor[0].numel() if tensor.dim() else 4 for tensor in hf.values())
    room = max(bucket_bytes // alignment, 1) * alignment
    assert plan.targets[0].slot_bytes <= max(room, -(-row // alignment) * alignment)
    assert plan.num_buckets >= -(-4 * shape.num_parameters // max(room, row))


def test_a_part_out_of_order_a_missing_one_and_a_double_one_are_refused() -> None:
    plan, hf = plan_of(SHAPE, 512), stamped_hf(SHAPE)
    buffers = filled(plan, hf)
    cut = next(i for i, b in enumerate(buffers) if any(e.rows and e.rows[0] == 0 for e in b.manifest.entries))
    with pytest.raises(RunFailed, match=r"rows \d+ to \d+ came, expected row|came before the rest of"):
        assembled(plan, [*buffers[: cut + 1], *buffers[cut + 2 :]])
    with pytest.raises(RunFailed, match=r"came twice|expected row"):
        assembled(plan, [*buffers[: cut + 1], buffers[cut]])
    with pytest.raises(RunFailed, match=r"lm_head\.weight only \d+ of 61 rows came"):
        assembled(plan, buffers[:-1])
    assert assembled(plan, buffers).keys() == hf.keys()


def test_a_tensor_that_was_not_announced_another_dtype_and_another_shape_are_refused() -> None:
    plan, hf = plan_of(SHAPE, None), stamped_hf(SHAPE)
    [buffer] = filled(plan, hf)
    update = update_of(plan, verify=False)
    table = dict(plan.table)
    norm = table.pop("model.norm.weight")
    for wrong, attribute in (
        (table, "unexpected"),
        ({**table, "model.norm.weight": ("bfloat16", norm[1])}, "misshapen"),
        ({**table, "model.norm.weight": ("float32", (9,))}, "misshapen"),
        ({**plan.table, "extra": norm}, "missing"),
    ):
        with pytest.raises(NamesDiffer) as error:
            assembled(plan, [buffer], replace(update, table=wrong))
        assert getattr(error.value, attribute)


def test_a_flipped_byte_and_another_version_are_refused() -> None:
    plan, hf = plan_of(SHAPE, 512), stamped_hf(SHAPE)
    buffers = filled(plan, hf)
    with pytest.raises(RunFailed, match="a bucket of version 2 came"):
        assembled(plan, filled(plan, hf, version=2))
    buffers[3].data[20] ^= 1
    with pytest.raises(RunFailed, match="bytes differ"):
        assembled(plan, buffers)


def test_what_came_must_be_what_was_announced_as_a_whole() -> None:
    plan, hf = plan_of(SHAPE, None), stamped_hf(SHAPE)
    [buffer] = filled(plan, hf)
    assembler = Assembler(replace(update_of(plan), fingerprint="another model"))
    list(assembler.tensors(buffer.manifest, buffer.views()))
    with pytest.raises(RunFailed, match="fingerprints differ"):
        assembler.finish()


@pytest.mark.parametrize("keep", [True, False])
def test_tensors_in_parts_have_memory_of_their_own_or_share_one_room(keep: bool) -> None:
    plan, hf = plan_of(SHAPE, 512), stamped_hf(SHAPE)
    assembler = Assembler(update_of(plan), keep)
    cut = {entry.name for manifest in plan.targets[0].buckets for entry in manifest.entries if entry.rows}
    held = [t for b in filled(plan, hf) for name, t in assembler.tensors(b.manifest, b.views()) if name in cut]
    assert len({tensor.untyped_storage().data_ptr() for tensor in held}) == (len(cut) if keep else 1)
    assert held[0].untyped_storage().nbytes() == (4 * hf["model.embed_tokens.weight"].numel())
    assert torch.equal(held[0], hf["model.embed_tokens.weight"]) == keep


class Recorder:
    def __init__(self) -> None:
        self.calls: list[object] = []

    def start(self, update: Update) -> None:
        self.calls.append(("start", update.version, update.num_buckets, update.verify))

    def settle(self) -> None:
        self.calls.append("settle")

    def load(self, bucket: Bucket) -> None:
        self.calls.append(("load", bucket.paths, bucket.manifests, bucket.num_bytes))

    def finish(self) -> None:
        self.calls.append("finish")


def test_one_buffer_is_delivered_to_several_receivers_in_order() -> None:
    manifest: Manifest = build_manifest({"w": ((2, 3), torch.float32)}, weight_version=4)
    buffer = WeightBuffer.create(manifest)
    one, other = Recorder(), Recorder()
    deliver(Receivers([one, other]), buffer)
    assert one.calls == other.calls
    assert one.calls == [("start", 4, 1, False), "settle", ("load", (buffer.path,), (manifest,), 24), "finish"]
    buffer.close()
