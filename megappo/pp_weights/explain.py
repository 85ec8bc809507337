"""How will the weights of a config travel? `explain_lines`: owners, offsets, senders, memory, from the plan alone. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from megappo.pp_weights.plan import Target, TransferPlan, Way, Write


def explain_lines(plan: TransferPlan, way: Way, num_slots: int) -> Iterator[str]:
    """For people: the ranks, who sends how many bytes to whom, the memory that it takes, then every tensor with its place and its
    owners. num_slots: buffers of a bucket's size on a receiving rank."""
    layout = plan.layout
    receivers = ", ".join(f"rank {target.receiver}" for target in plan.targets)
    yield f"layout: {layout}, {layout.world_size} ranks, {layout.num_layers} layers"
    yield f"model: {len(plan.table)} tensors, {_bytes(plan.model_bytes)}; fingerprint {plan.fingerprint}"
    yield f"way: gather {plan.gather}, transport {way}, {plan.num_buckets} bucket{'s' * (plan.num_buckets > 1)}, to {receivers}"
    yield ""
    yield from _rank_lines(plan)
    yield ""
    yield "who sends how many bytes to whom"
    yield from (f"  {line}" for line in _traffic_lines(plan, way))
    yield ""
    yield "extra memory at the peak, beside the model"
    yield from (f"  {line}" for line in _memory_lines(plan, way, num_slots))
    for target in plan.targets:
        yield ""
        yield f"what rank {target.receiver} receives (tensor, dtype, shape: bucket @ offset, bytes, owners)"
        yield from (f"  {line}" for line in _tensor_lines(plan, target))


def _rank_lines(plan: TransferPlan) -> Iterator[str]:
    layout = plan.layout
    yield "rank  tp pp dp  layers of each chunk                   copies"
    for rank in range(layout.world_size):
        own = layout.coordinates(rank)
        chunks = []
        for chunk in range(layout.vpp):
            layers = layout.layers(own.pp, chunk)
            held = f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0]) if layers else "none"
            held = f"E+{held}" if layout.holds_embedding(own.pp, chunk) else held
            chunks.append(f"{held}+L" if layout.holds_head(own.pp, chunk) else held)
        yield f"{rank:4}  {own.tp:2} {own.pp:2} {own.dp:2}  {' | '.join(chunks):36}  {_bytes(_sent(plan, rank)):>10}"


def _traffic_lines(plan: TransferPlan, way: Way) -> Iterator[str]:
    layout = plan.layout
    if way == "shared_memory":
        for rank in range(layout.world_size):
            target = plan.targets[plan.target_of(rank)].receiver
            yield f"rank {rank} writes {_bytes(_sent(plan, rank))} into the memory of rank {target}"
        yield "no rank receives anything through a collective; all ranks meet once a bucket (a byte through a pipe)"
        return
    traffic: dict[tuple[int, int], int] = defaultdict(int)
    for tp in range(layout.tp):
        column = [layout.rank_of(tp=tp, pp=stage) for stage in range(layout.pp)]
        for sender in column:
            for receiver in column:
                traffic[sender, receiver] += _sent(plan, sender) * (sender != receiver)
        if plan.gather == "full":  # then the first stage's ranks give each other what they have gathered
            for other in range(layout.tp):
                traffic[column[0], layout.rank_of(tp=other)] += sum(_sent(plan, rank) for rank in column) * (other != tp)
    for (sender, receiver), count in sorted(traffic.items()):
        if count:
            yield f"rank {sender} -> rank {receiver}: {_bytes(count)}"
    most = max((sum(c for (_, to), c in traffic.items() if to == rank) for rank in range(layout.world_size)), default=0)
    t, p = layout.tp, layout.pp
    formula = f"({t} x {p} - 1) / ({t} x {p})" if plan.gather == "full" else f"({p} - 1) / ({t} x {p})"
    least = f"{formula} of the model = {_bytes(plan.formula_bytes)}"
    yield f"the most that a rank receives: {_bytes(most)}; the least that is possible: {least}"


def _memory_lines(plan: TransferPlan, way: Way, num_slots: int) -> Iterator[str]:
    where = "GPU" if way == "cuda_ipc" else "host"
    for target in plan.targets:
        buffers = f"{num_slots} buffer{'s' * (num_slots > 1)}"
        total = _bytes(num_slots * target.slot_bytes)
        yield f"rank {target.receiver}: {buffers} of {_bytes(target.slot_bytes)} = {total} ({where} memory)"
    if way != "shared_memory":
        room = max(_gathered(plan, bucket) for bucket in range(plan.num_buckets))
        yield f"each rank that gathers: room for one bucket, at most {_bytes(room)}"
    cut = [name for bucket in plan.targets[0].buckets for name in (entry.name for entry in bucket.entries if entry.rows)]
    if cut:
        yield f"the engine: room for the largest tensor that comes in parts, at most {_bytes(plan.largest_tensor_bytes)}"


def _tensor_lines(plan: TransferPlan, target: Target) -> Iterator[str]:
    index = plan.targets.index(target)
    for number, bucket in enumerate(target.buckets):
        owners: dict[str, list[tuple[int, Write]]] = defaultdict(list)
        for rank, writes in enumerate(plan.writes):
            for write in writes[number]:
                if write.target == index and write.num_elements:
                    owners[write.piece.hf_name].append((rank, write))
        for entry in bucket.entries:
            rows = f" rows {entry.rows[0]}:{entry.rows[1]}" if entry.rows else ""
            found = sorted(owners[entry.name], key=lambda owned: (owned[1].piece.start, owned[0]))
            places = ", ".join(f"rank {rank} {_range(write, entry.rows)}" for rank, write in found)
            shape = "x".join(map(str, entry.shape)) or "scalar"
            yield f"{entry.name} {entry.dtype} {shape}{rows}: {number} @ {entry.offset}, {entry.num_bytes}: {places}"


def _range(write: Write, rows: tuple[int, int] | None) -> str:
    """The slice in numpy's words, counted in the whole tensor."""
    piece = write.piece
    first = rows[0] if rows and piece.dim == 0 else 0
    return f"[{', '.join([':'] * piece.dim + [f'{first + piece.start}:{first + piece.stop}'])}]"


def _sent(plan: TransferPlan, rank: int) -> int:
    return sum(plan.bytes_of(write) for writes in plan.writes[rank] for write in writes)


def _gathered(plan: TransferPlan, bucket: int) -> int:
    return sum(plan.bytes_of(write) for writes in plan.writes for write in writes[bucket])


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} bytes"
