"""Reduce-scatter and all-gather of rows in e4m3 with a scale a token: half the bytes of bf16 on the link."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from katydid_kernels.peer_reduce.meeting import meet
from katydid_kernels.peer_reduce.rows import quantized_row

__all__ = ["all_gather_kernel", "reduce_scatter_kernel"]


@triton.jit(do_not_specialize=["rank", "rows", "signals_offset", "out_offset", "scales_offset", "patience"])
def all_gather_kernel(
    x_ptr, pointers_ptr, rounds_ptr, failed_ptr, rank, rows, hidden, signals_offset, out_offset, scales_offset,
    patience, RANKS: tl.constexpr, BLOCK: tl.constexpr, SYNC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Writes this rank's ``[rows, hidden]`` to rows ``rank * rows`` on of every rank's results; then waits for theirs.

    Nobody writes before all have come: by then a rank is done with what it gathered before.
    """
    if EARLY:
        gdc_wait()
    rounds_ptr += tl.program_id(0)
    number = tl.load(rounds_ptr)
    if SYNC:
        meet(pointers_ptr, signals_offset, rank, 2 * number + 1, failed_ptr, patience, RANKS)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        x = tl.load(x_ptr + tl.cast(i, tl.int64) * hidden + column, mask=inside, other=0.0).to(tl.float32)
        q, scale = quantized_row(x)
        row = rank * rows + i
        for peer in tl.static_range(RANKS):
            theirs = tl.load(pointers_ptr + peer)
            target = (theirs + out_offset).to(tl.pointer_type(tl.float8e4nv)) + row.to(tl.int64) * hidden
            tl.store(tl.multiple_of(target, 16) + column, q, mask=inside)
            tl.store((theirs + scales_offset).to(tl.pointer_type(tl.float32)) + row, scale)
    if SYNC:
        meet(pointers_ptr, signals_offset, rank, 2 * number + 2, failed_ptr, patience, RANKS)
    tl.store(rounds_ptr, number + 1)


@triton.jit(
    do_not_specialize=["rank", "rows", "capacity", "signals_offset", "data_offset", "scales_offset", "patience"]
)
def reduce_scatter_kernel(
    x_ptr, out_ptr, pointers_ptr, rounds_ptr, failed_ptr, rank, rows, capacity, hidden, signals_offset, data_offset,
    scales_offset, patience, RANKS: tl.constexpr, BLOCK: tl.constexpr, SEND: tl.constexpr, SYNC: tl.constexpr,
    RECEIVE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sends rows ``p * rows`` on of x, ``[RANKS * rows, hidden]``, to rank p; sums what the others sent.

    A buffer has room for two rounds, ``[2][source][capacity][hidden]``, which take turns: a rank that sends into the
    room of two rounds ago has met, a round ago, everyone who read it. Program p sends and sums the rows p, p + programs
    and so on, so it only needs to meet its own kind.
    """
    if EARLY:
        gdc_wait()
    rounds_ptr += tl.program_id(0)
    number = tl.load(rounds_ptr)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    room = (number % 2) * RANKS
    if SEND:
        for i in range(tl.program_id(0), rows, tl.num_programs(0)):
            for peer in tl.static_range(RANKS):
                x = tl.load(x_ptr + (peer * rows + i).to(tl.int64) * hidden + column, mask=inside, other=0.0)
                q, scale = quantized_row(x.to(tl.float32))
                theirs = tl.load(pointers_ptr + peer)
                row = (room + rank) * capacity + i
                target = (theirs + data_offset).to(tl.pointer_type(tl.float8e4nv)) + row.to(tl.int64) * hidden
                tl.store(tl.multiple_of(target, 16) + column, q, mask=inside)
                tl.store((theirs + scales_offset).to(tl.pointer_type(tl.float32)) + row, scale)
    if SYNC:
        meet(pointers_ptr, signals_offset, rank, 2 * number + 1, failed_ptr, patience, RANKS)
    if RECEIVE:
        mine = tl.load(pointers_ptr + rank)
        for i in range(tl.program_id(0), rows, tl.num_programs(0)):
            total = tl.zeros((BLOCK,), tl.float32)
            for peer in tl.static_range(RANKS):
                row = (room + peer) * capacity + i
                scale = tl.load((mine + scales_offset).to(tl.pointer_type(tl.float32)) + row)
                source = (mine + data_offset).to(tl.pointer_type(tl.float8e4nv)) + row.to(tl.int64) * hidden
                q = tl.load(tl.multiple_of(source, 16) + column, mask=inside, other=0.0)
                total += q.to(tl.float32) * scale
            target = out_ptr + tl.cast(i, tl.int64) * hidden + column
            tl.store(target, total.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(rounds_ptr, number + 1)
