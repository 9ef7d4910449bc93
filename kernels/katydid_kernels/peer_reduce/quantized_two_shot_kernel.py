"""All-reduce, add and norm of many rows with e4m3 on the link both ways: half of what `two_shot_kernel` moves.

Each rank quantises the rows of the others' shares and writes them to their owners; an owner sums what came, its own
summand as it is, adds and norms, and writes the result, quantised again, to all. A program sends, sums and returns the
rows p, p + programs and so on of each share, so it only meets its own kind: once before the sum, and at the end, when
all results are there and what was sent may be overwritten.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from katydid_kernels.peer_reduce.meeting import count_round, meet
from katydid_kernels.peer_reduce.rows import normed_row, quantized_row

__all__ = ["quantized_two_shot_kernel"]


@triton.jit(
    do_not_specialize=[
        "rank", "tokens", "signals_offset", "sent_offset", "sent_scales_offset", "out_offset", "scales_offset",
        "patience",
    ]
)  # fmt: skip
def quantized_two_shot_kernel(
    x_ptr, pointers_ptr, state_ptr, failed_ptr, residual_ptr, residual_out_ptr, weight_ptr, rank, tokens, hidden, eps,
    signals_offset, sent_offset, sent_scales_offset, out_offset, scales_offset, patience, RANKS: tl.constexpr, BLOCK:
    tl.constexpr, SEND: tl.constexpr, SYNC: tl.constexpr, RECEIVE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x: ``[tokens, hidden]``, this rank's summand. Residuals: this rank's rows. Offsets as in `two_shot_kernel`; what
    is sent lies in the owner's buffer as ``[source][row of its share][hidden]``.
    """
    if EARLY:
        gdc_wait()
    number = tl.load(state_ptr)
    share = (tokens + RANKS - 1) // RANKS
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    if SEND:
        for i in range(tl.program_id(0), share, tl.num_programs(0)):
            for step in tl.static_range(1, RANKS):
                # Each rank begins with its next: no owner is written to by all at once.
                peer = (rank + step) & (RANKS - 1)
                row = peer * share + i
                if row < tokens:
                    x = tl.load(x_ptr + row.to(tl.int64) * hidden + column, mask=inside, other=0.0)
                    q, scale = quantized_row(x.to(tl.float32))
                    theirs = tl.load(pointers_ptr + peer)
                    place = rank * share + i
                    target = (theirs + sent_offset).to(tl.pointer_type(tl.float8e4nv)) + place.to(tl.int64) * hidden
                    tl.store(tl.multiple_of(target, 16) + column, q, mask=inside)
                    tl.store((theirs + sent_scales_offset).to(tl.pointer_type(tl.float32)) + place, scale)
    if SYNC:
        meet(pointers_ptr, signals_offset, rank, 2 * number + 1, failed_ptr, patience, RANKS)
    if RECEIVE:
        mine = tl.load(pointers_ptr + rank)
        first = rank * share
        own_rows = tl.minimum(share, tl.maximum(tokens - first, 0))
        for i in range(tl.program_id(0), own_rows, tl.num_programs(0)):
            total = tl.zeros((BLOCK,), tl.float32)
            for peer in tl.static_range(RANKS):
                if peer == rank:
                    x = tl.load(x_ptr + (first + i).to(tl.int64) * hidden + column, mask=inside, other=0.0)
                    total += x.to(tl.float32)
                else:
                    place = peer * share + i
                    scale = tl.load((mine + sent_scales_offset).to(tl.pointer_type(tl.float32)) + place)
                    source = (mine + sent_offset).to(tl.pointer_type(tl.float8e4nv)) + place.to(tl.int64) * hidden
                    q = tl.load(tl.multiple_of(source, 16) + column, mask=inside, other=0.0)
                    total += q.to(tl.float32) * scale
            y = normed_row(total, i, residual_ptr, residual_out_ptr, weight_ptr, hidden, eps, BLOCK)
            q, scale = quantized_row(y)
            place = (first + i).to(tl.int64) * hidden
            for step in tl.static_range(RANKS):
                theirs = tl.load(pointers_ptr + ((rank + step) & (RANKS - 1)))
                target = (theirs + out_offset).to(tl.pointer_type(tl.float8e4nv)) + place
                tl.store(tl.multiple_of(target, 16) + column, q, mask=inside)
                tl.store((theirs + scales_offset).to(tl.pointer_type(tl.float32)) + first + i, scale)
        if SYNC:
            meet(pointers_ptr, signals_offset, rank, 2 * number + 2, failed_ptr, patience, RANKS)
        count_round(state_ptr, number, tokens)
