"""All-reduce, add and norm of many rows: each rank sums, adds and norms its share, and sends it to all others.

What a rank sends is (n - 1) / n of the rows twice, and the norm is computed once, not n times. Rows are written, never
read, over the link: a write needs no answer. Summands go to the owners of their rows, in bf16 or in e4m3 with a scale
(an owner's own summand is taken as it is); the results go from the owners to all, in either form. The residual stays
where its rows are: every rank keeps that of its own share.

A program sends, sums and returns the rows p, p + programs and so on of each share, so it only meets its own kind: once
before the sum, and at the end, when all results are there and what was sent may be overwritten.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from katydid_kernels.peer_reduce.meeting import meet
from katydid_kernels.peer_reduce.rows import normed_row, quantized_row

__all__ = ["two_shot_kernel"]


@triton.jit(
    do_not_specialize=[
        "rank", "tokens", "signals_offset", "sent_offset", "sent_scales_offset", "out_offset", "scales_offset",
        "patience",
    ]
)  # fmt: skip
def two_shot_kernel(
    x_ptr, pointers_ptr, rounds_ptr, failed_ptr, residual_ptr, residual_out_ptr, weight_ptr, own_ptr, rank, tokens,
    hidden, eps, signals_offset, sent_offset, sent_scales_offset, out_offset, scales_offset, patience,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, QUANTIZED: tl.constexpr, FP8: tl.constexpr, SEND: tl.constexpr,
    SYNC: tl.constexpr, RECEIVE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x: ``[tokens, hidden]``, this rank's summand. Residuals, and own, where this rank's results go in bf16 as well:
    of its share. Offsets into a rank's buffer: flags in words of four bytes, the others in bytes; what is sent lies in
    the owner's as ``[source][row of its share][hidden]``. QUANTIZED: the summands, FP8: the results.
    """
    if EARLY:
        gdc_wait()
    rounds_ptr += tl.program_id(0)
    number = tl.load(rounds_ptr)
    share = (tokens + RANKS - 1) // RANKS
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    if SEND:
        for i in range(tl.program_id(0), share, tl.num_programs(0)):
            place = rank * share + i
            for step in tl.static_range(1, RANKS):
                # Each rank begins with its next: no owner is written to by all at once.
                peer = (rank + step) & (RANKS - 1)
                row = peer * share + i
                if row < tokens:
                    x = tl.load(x_ptr + row.to(tl.int64) * hidden + column, mask=inside, other=0.0)
                    theirs = tl.load(pointers_ptr + peer)
                    if QUANTIZED:
                        q, scale = quantized_row(x.to(tl.float32))
                        target = (theirs + sent_offset).to(tl.pointer_type(tl.float8e4nv)) + place.to(tl.int64) * hidden
                        tl.store(tl.multiple_of(target, 16) + column, q, mask=inside)
                        tl.store((theirs + sent_scales_offset).to(tl.pointer_type(tl.float32)) + place, scale)
                    else:
                        target = (theirs + sent_offset).to(tl.pointer_type(tl.bfloat16)) + place.to(tl.int64) * hidden
                        tl.store(tl.multiple_of(target, 16) + column, x, mask=inside)
    if SYNC:
        meet(pointers_ptr, signals_offset, rank, 2 * number + 1, failed_ptr, patience, RANKS)
    if RECEIVE:
        mine = tl.load(pointers_ptr + rank)
        first = rank * share
        own_rows = tl.minimum(share, tl.maximum(tokens - first, 0))
        for i in range(tl.program_id(0), own_rows, tl.num_programs(0)):
            total = tl.zeros((BLOCK,), tl.float32)
            for peer in tl.static_range(RANKS):
                place = peer * share + i
                if peer == rank:
                    x = tl.load(x_ptr + (first + i).to(tl.int64) * hidden + column, mask=inside, other=0.0)
                    total += x.to(tl.float32)
                elif QUANTIZED:
                    scale = tl.load((mine + sent_scales_offset).to(tl.pointer_type(tl.float32)) + place)
                    source = (mine + sent_offset).to(tl.pointer_type(tl.float8e4nv)) + place.to(tl.int64) * hidden
                    q = tl.load(tl.multiple_of(source, 16) + column, mask=inside, other=0.0)
                    total += q.to(tl.float32) * scale
                else:
                    source = (mine + sent_offset).to(tl.pointer_type(tl.bfloat16)) + place.to(tl.int64) * hidden
                    total += tl.load(tl.multiple_of(source, 16) + column, mask=inside, other=0.0).to(tl.float32)
            y = normed_row(total, i, residual_ptr, residual_out_ptr, weight_ptr, hidden, eps, BLOCK)
            if own_ptr is not None:
                tl.store(own_ptr + tl.cast(i, tl.int64) * hidden + column, y.to(tl.bfloat16), mask=inside)
            place = (first + i).to(tl.int64) * hidden
            if FP8:
                q, scale = quantized_row(y)
                for step in tl.static_range(RANKS):
                    theirs = tl.load(pointers_ptr + ((rank + step) & (RANKS - 1)))
                    target = tl.multiple_of((theirs + out_offset).to(tl.pointer_type(tl.float8e4nv)) + place, 16)
                    tl.store(target + column, q, mask=inside)
                    tl.store((theirs + scales_offset).to(tl.pointer_type(tl.float32)) + first + i, scale)
            else:
                for step in tl.static_range(RANKS):
                    theirs = tl.load(pointers_ptr + ((rank + step) & (RANKS - 1)))
                    target = tl.multiple_of((theirs + out_offset).to(tl.pointer_type(tl.bfloat16)) + place, 16)
                    tl.store(target + column, y.to(tl.bfloat16), mask=inside)
        if SYNC:
            meet(pointers_ptr, signals_offset, rank, 2 * number + 2, failed_ptr, patience, RANKS)
        tl.store(rounds_ptr, number + 1)
