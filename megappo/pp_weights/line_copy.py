"""How are blocks of rows copied at the speed of one big memcpy? `copy_blocks`, compiled by numba when this file is imported.

Whole cache lines are stored past the cache (non-temporal stores), as libc's memcpy does for blocks of some MB: a line of the
destination is then not read before it is written. Many small tensors gain what one big block does.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

LINE = 64
_COPY = types.void(types.int64, types.int64, types.int64)  # address, address, how many


@intrinsic  # type: ignore[untyped-decorator]
def _store_lines(context: Any, to: Any, of: Any, lines: Any) -> Any:
    """Copy whole lines; `to` is at a multiple of 64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, of, lines = arguments
        i64 = ir.IntType(64)
        line = ir.VectorType(i64, LINE // 8).as_pointer()
        start = builder.block
        head, body, end = (builder.append_basic_block(name) for name in ("head", "body", "end"))
        size = builder.mul(lines, i64(LINE))
        builder.branch(head)
        builder.position_at_end(head)
        at = builder.phi(i64)
        at.add_incoming(i64(0), start)
        builder.cbranch(builder.icmp_unsigned("<", at, size), body, end)
        builder.position_at_end(body)
        load = builder.load(builder.inttoptr(builder.add(of, at), line))
        load.align = 1
        store = builder.store(load, builder.inttoptr(builder.add(to, at), line))
        store.align = LINE
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        at.add_incoming(builder.add(at, i64(LINE)), body)
        builder.branch(head)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return _COPY, generate


@intrinsic  # type: ignore[untyped-decorator]
def _store_bytes(context: Any, to: Any, of: Any, size: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, of, size = arguments
        byte = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(builder, builder.inttoptr(to, byte), builder.inttoptr(of, byte), size, 1)
        return context.get_dummy_value()

    return _COPY, generate


@intrinsic  # type: ignore[untyped-decorator]
def _fence(context: Any) -> Any:
    """Others see what was stored past the cache only behind a fence."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@njit("void(int64[:,::1])", nogil=True, cache=True)  # type: ignore[untyped-decorator]
def copy_blocks(table: Any) -> None:
    """Copy each block of the table (n, 6): address of destination and source, bytes of a row, rows, steps of both in bytes."""
    for entry in range(table.shape[0]):
        to, of, size, rows, step_to, step_of = table[entry]
        for _ in range(rows):
            head = min(-to % LINE, size)
            if head:
                _store_bytes(to, of, head)
            lines = (size - head) // LINE
            _store_lines(to + head, of + head, lines)
            done = head + lines * LINE
            if done < size:
                _store_bytes(to + done, of + done, size - done)
            to += step_to
            of += step_of
    _fence()
