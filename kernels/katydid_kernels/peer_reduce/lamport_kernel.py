"""All-reduce, add and norm of few rows in one crossing of the link: the data are their own flags.

Every rank's buffer has three rounds' worth of room, ``[3][source][row][words]``, filled with a word that no data can
be: two negative zeros (negative zeros are sent as positive ones). A rank writes its rows to the others' room of this
round, then reads its own room until no word is left that has not come (words of four bytes arrive whole); what it adds
itself stays in registers. It clears the room of the round before. Two rounds lie between a clearing and the next write
there, and a peer can only begin the second after this rank took part in the first, so no write can meet a clearing.

One program a row, and each row counts its own rounds: rows have nothing to do with each other, so nothing is counted
together and no program waits for another of its rank. What a row knows of its round is on the device, so a graph can be
replayed. What the norm needs beside the sum is asked for before the wait.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from katydid_kernels.peer_reduce.rows import quantized_row

__all__ = ["EMPTY", "lamport_kernel"]

EMPTY = -2147450880  # 0x80008000
_EMPTY = tl.constexpr(EMPTY)


@triton.jit(do_not_specialize=["rank", "capacity", "patience"])
def lamport_kernel(
    x_ptr, pointers_ptr, rounds_ptr, failed_ptr, residual_ptr, residual_out_ptr, weight_ptr, out_ptr, scales_ptr, rank,
    capacity, hidden, eps, patience, RANKS: tl.constexpr, BLOCK: tl.constexpr, SEND: tl.constexpr,
    RECEIVE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """x: int32 words of bf16 pairs ``[tokens, hidden / 2]``. rounds: int32, of each row. Without a weight the sum
    itself is the result. SEND and RECEIVE: both, or one after the other where ranks run in turn. EARLY: launched while
    the kernel before runs.
    """
    HALF: tl.constexpr = BLOCK // 2
    row = tl.program_id(0)
    words = hidden // 2
    word = tl.arange(0, HALF)
    inside = word < words
    column = tl.arange(0, BLOCK)
    within = column < hidden
    place = row.to(tl.int64) * hidden + column
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=within, other=0.0).to(tl.float32)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.load(rounds_ptr + row)
    source_words = capacity * words
    room = (number % 3).to(tl.int64) * (RANKS * source_words)
    mine = tl.load(pointers_ptr + rank).to(tl.pointer_type(tl.int32))
    x = tl.load(x_ptr + row.to(tl.int64) * words + word, mask=inside, other=0)
    if weight_ptr is not None:
        residual = tl.load(residual_ptr + place, mask=within, other=0.0).to(tl.float32)
    x = tl.where((x & 0xFFFF) == 0x8000, x & -65536, x)
    x = tl.where((x & -65536) == -2147483648, x & 0xFFFF, x)
    if SEND:
        for peer in tl.static_range(RANKS):
            theirs = tl.load(pointers_ptr + peer).to(tl.pointer_type(tl.int32))
            target = tl.multiple_of(theirs + room + rank * source_words + row * words, 16)
            tl.store(target + word, x, mask=inside & (peer != rank))
    if RECEIVE:
        old = ((number + 2) % 3).to(tl.int64) * (RANKS * source_words)
        for peer in tl.static_range(RANKS):
            target = tl.multiple_of(mine + old + peer * source_words + row * words, 16)
            tl.store(target + word, _EMPTY + word * 0, mask=inside & (peer != rank))
        low = (x << 16).to(tl.float32, bitcast=True)
        high = (x & -65536).to(tl.float32, bitcast=True)
        missing = RANKS - 1
        looks = 0
        while (missing > 0) & (looks < patience):
            low = tl.zeros((HALF,), tl.float32)
            high = tl.zeros((HALF,), tl.float32)
            lacks = tl.zeros((HALF,), tl.int32)
            for peer in tl.static_range(RANKS):
                source = tl.multiple_of(mine + room + peer * source_words + row * words, 16)
                pair = tl.load(source + word, mask=inside & (peer != rank), other=0, volatile=True)
                pair = tl.where(peer == rank, x, pair)
                lacks += (pair == _EMPTY).to(tl.int32)
                low += (pair << 16).to(tl.float32, bitcast=True)
                high += (pair & -65536).to(tl.float32, bitcast=True)
            missing = tl.max(lacks, 0)
            looks += 1
        if missing > 0:
            tl.store(failed_ptr, 1)
        y = tl.reshape(tl.join(low, high), (BLOCK,))
        if weight_ptr is not None:
            rounded = (y + residual).to(residual_out_ptr.dtype.element_ty)
            tl.store(residual_out_ptr + place, rounded, mask=within)
            y = rounded.to(tl.float32)
            y = y * tl.rsqrt(tl.sum(y * y, 0) / hidden + eps) * weight
        if scales_ptr is not None:
            q, scale = quantized_row(y)
            tl.store(out_ptr + place, q, mask=within)
            tl.store(scales_ptr + row, scale)
        else:
            tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=within)
        tl.store(rounds_ptr + row, number + 1)
