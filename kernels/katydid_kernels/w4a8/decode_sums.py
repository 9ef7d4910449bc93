"""Where the down products of the decode kernel of experts go: to rows that all CTAs sum together at the end or, where
a CTA has all of a token's tiles, into the token's sum.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from katydid_kernels.gemm.expert_tiles import store_columns
from katydid_kernels.gemm.experts_sum import piece_layout, routes_of, sum_choices
from katydid_kernels.w4a8.decode_order import rows_of
from katydid_kernels.w4a8.packed_tiles import accumulator_layout, multiply_packed

__all__ = ["combine_rows", "store_tile", "sum_token"]


@gluon.jit
def store_tile(acc, row, end, strip, y_ptr, H: gl.constexpr):
    """A strip of the rows of a tile, in bf16."""
    TOKENS: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = acc.type.layout
    if strip < H // 64:
        if TOKENS <= 16:
            # Straight from the accumulator: through shared memory it would be wider stores, and two barriers a tile.
            rows = row + gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
            cols = strip * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
            target = y_ptr + rows.to(gl.int64)[None, :] * H + cols[:, None]
            gl.store(target, acc.to(gl.bfloat16), mask=(rows < end)[None, :])
        else:
            store_columns(acc, y_ptr, H, row, end, strip * 64, gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))


@gluon.jit
def sum_token(
    WHO: gl.constexpr, plan, result, scale, ring, meeting, stage, phase, item, turn, down_k,
    H: gl.constexpr, RUN: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr,
):  # fmt: skip
    """A token's strip of the result, and the place in the ring after it: each warpgroup weighs and sums every other of
    the token's RUN tiles, whose rows are columns 0 and 1 of the product."""
    _, _, weights_ptr, shared_ptr, out_ptr, _ = result
    buffer, filled, free = meeting
    TOKENS: gl.constexpr = ring[0].type.shape[1]
    STRIPS: gl.constexpr = H // 64
    layout: gl.constexpr = accumulator_layout(TOKENS)
    pairs = item // STRIPS * RUN
    total = gl.zeros([64, TOKENS], gl.float32, layout)
    # Where no row was copied a product may be NaN: it is left out, not multiplied by zero.
    for j in range(WHO, RUN + WHO, 2):
        pair = pairs + gl.minimum(j, RUN - 1)
        row, end = rows_of(pair, plan)
        weight = gl.load(weights_ptr + pair) * scale
        acc, stage, phase = multiply_packed(WHO, ring, stage, phase, down_k, TOKENS, STAGES, WGS)
        total += gl.where((row < end) & (j < RUN), acc * weight, 0.0)
    lane = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    mine = gl.sum(gl.where((lane == WHO)[None, :], total, 0.0), 1)
    if WHO == 1:
        mbarrier.wait(free.index(0), (turn & 1) ^ 1)
        buffer.store(mine)
        gl.thread_barrier()
        mbarrier.arrive(filled.index(0), count=1)
    else:
        cols = item // STRIPS * H + item % STRIPS * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
        if shared_ptr is not None:
            mine += gl.load(shared_ptr + cols).to(gl.float32)
        mbarrier.wait(filled.index(0), turn & 1)
        mine += buffer.load(gl.SliceLayout(1, layout))
        gl.thread_barrier()
        mbarrier.arrive(free.index(0), count=1)
        gl.store(out_ptr + cols, mine.to(out_ptr.dtype.element_ty))
    return stage, phase


@gluon.jit
def combine_rows(
    WHO: gl.constexpr, result, H: gl.constexpr, TOP_K: gl.constexpr, PADDED: gl.constexpr, WGS: gl.constexpr,
    SUM: gl.constexpr,
):  # fmt: skip
    """The weighted sum of `gemm.combine`, in pieces of SUM tokens' rows over all warpgroups of the GPU."""
    y_ptr, slots_ptr, weights_ptr, shared_ptr, out_ptr, tokens = result
    PIECE: gl.constexpr = 256 if H % 256 == 0 else 128
    PIECES: gl.constexpr = H // PIECE
    TOKENS: gl.constexpr = SUM * (256 // PIECE)
    layout: gl.constexpr = piece_layout(PIECE)
    line = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    column = gl.arange(0, PIECE, gl.SliceLayout(0, layout))
    items = gl.cdiv(tokens, TOKENS) * PIECES
    for item in range(gl.program_id(0) * WGS + WHO, items, gl.num_programs(0) * WGS):
        col = item % PIECES * PIECE + column
        token = item // PIECES * TOKENS + line
        slots, weights = routes_of(item // PIECES, slots_ptr, weights_ptr, tokens, PIECE, TOKENS, TOP_K, PADDED)
        total = sum_choices(y_ptr, H, col, slots, weights, PIECE, TOP_K)
        target = token.to(gl.int64)[:, None] * H + col[None, :]
        there = (token < tokens)[:, None] & (col < H)[None, :]
        if shared_ptr is not None:
            total += gl.load(shared_ptr + target, mask=there, other=0.0).to(gl.float32)
        gl.store(out_ptr + target, total.to(out_ptr.dtype.element_ty), mask=there)
