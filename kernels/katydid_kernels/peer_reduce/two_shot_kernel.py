"""All-reduce, add and norm of many rows: each rank sums, adds and norms its share, and sends it to all others.

What a rank reads and sends is (n - 1) / n of the rows each way, and the norm is computed once, not n times. Rows lie in
the ranks' shared buffers: the summands where the kernel before put them, the results beside them. Two meetings: before
the first read, so that the summands are there and nobody still reads the last results; and at the end, so that all
results are. The residual stays where its rows are: every rank keeps that of its own share.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from katydid_kernels.peer_reduce.meeting import count_round, meet
from katydid_kernels.peer_reduce.rows import normed_row, quantized_row

__all__ = ["two_shot_kernel"]


@triton.jit(
    do_not_specialize=["rank", "tokens", "signals_offset", "x_offset", "out_offset", "scales_offset", "patience"]
)
def two_shot_kernel(
    pointers_ptr, state_ptr, failed_ptr, residual_ptr, residual_out_ptr, weight_ptr, rank, tokens, hidden, eps,
    signals_offset, x_offset, out_offset, scales_offset, patience, RANKS: tl.constexpr, BLOCK: tl.constexpr, FP8:
    tl.constexpr, SYNC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Offsets into a rank's buffer: flags in words of four bytes, the others in bytes. Residuals: this rank's rows.
    SYNC: off where ranks run in turn. EARLY: launched while the kernel before runs.
    """
    if EARLY:
        gdc_wait()
    number = tl.load(state_ptr)
    if SYNC:
        meet(pointers_ptr, signals_offset, rank, 2 * number + 1, failed_ptr, patience, RANKS)
    share = (tokens + RANKS - 1) // RANKS
    first = rank * share
    own_rows = tl.minimum(share, tl.maximum(tokens - first, 0))
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    for i in range(tl.program_id(0), own_rows, tl.num_programs(0)):
        place = (first + i).to(tl.int64) * hidden
        total = tl.zeros((BLOCK,), tl.float32)
        for peer in tl.static_range(RANKS):
            theirs = (tl.load(pointers_ptr + peer) + x_offset).to(tl.pointer_type(tl.bfloat16))
            source = tl.multiple_of(theirs + place, 16)
            total += tl.load(source + column, mask=inside, other=0.0).to(tl.float32)
        y = normed_row(total, i, residual_ptr, residual_out_ptr, weight_ptr, hidden, eps, BLOCK)
        if FP8:
            q, scale = quantized_row(y)
            for peer in tl.static_range(RANKS):
                theirs = tl.load(pointers_ptr + peer)
                target = tl.multiple_of((theirs + out_offset).to(tl.pointer_type(tl.float8e4nv)) + place, 16)
                tl.store(target + column, q, mask=inside)
                tl.store((theirs + scales_offset).to(tl.pointer_type(tl.float32)) + first + i, scale)
        else:
            for peer in tl.static_range(RANKS):
                theirs = (tl.load(pointers_ptr + peer) + out_offset).to(tl.pointer_type(tl.bfloat16))
                tl.store(tl.multiple_of(theirs + place, 16) + column, y.to(tl.bfloat16), mask=inside)
    if SYNC:
        meet(pointers_ptr, signals_offset, rank, 2 * number + 2, failed_ptr, patience, RANKS)
    count_round(state_ptr, number, tokens)
