"""Down weights with rows of 192 bytes, read two rows at a time.

The copy engine fetches lines of 128 bytes. Rows of 192 (192 columns in e4m3: an eighth of Hy3's experts) begin in the
middle of one and end in the middle of another, so fetching 128 bytes and 64 of each asks for twice the lines there are.
Two rows are three whole lines: of 64 pairs the first line holds columns 0-127 of the even rows, the third columns
64-191 of the odd ones, the second what is left of both. One warpgroup multiplies the even rows, the other the odd ones,
so the product has its columns in blocks of 128 with the even ones first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from katydid_kernels.gemm.expert_tiles import accumulator_layout
from katydid_kernels.gemm.ring import advance

__all__ = ["even_column", "multiply_pairs", "stream_pairs"]


@gluon.jit
def even_column(i):
    """Where the i-th even column of a row stands; the odd one after it stands 64 further."""
    return i // 64 * 128 + i % 64


@gluon.jit
def stream_pairs(w2_desc, expert, tile, ring, stage, phase, STAGES: gl.constexpr):
    """Fetch 64 pairs of rows into two stages: the first and the third line, then the second."""
    _, w_bufs, full, empty = ring
    BOX: gl.constexpr = w2_desc.block_type.shape
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(bar, 2 * w2_desc.block_type.nbytes)
    for part in gl.static_range(2):
        tma.async_copy_global_to_shared(
            w2_desc, [expert, tile * BOX[1], 0, 2 * part * BOX[3]], bar, w_bufs.index(stage * 2 + part).reshape(BOX)
        )
    stage, phase = advance(stage, phase, STAGES)
    bar = full.index(stage)
    mbarrier.wait(empty.index(stage), phase)
    mbarrier.expect(bar, w2_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(
        w2_desc, [expert, tile * BOX[1], 0, BOX[3]], bar, w_bufs.index(stage * 2).reshape(BOX)
    )
    return advance(stage, phase, STAGES)


@gluon.jit
def multiply_pairs(
    WHO: gl.constexpr, ring, stage, phase, ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """The even rows (WHO 0) or the odd ones (1) of two stages by h, of which each stage holds 128 columns."""
    x_bufs, w_bufs, full, empty = ring
    layout: gl.constexpr = accumulator_layout(TOKENS, x_bufs.dtype.primitive_bitwidth)
    second, second_phase = advance(stage, phase, STAGES)
    acc = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    mbarrier.wait(full.index(stage), phase)
    outer = w_bufs.index(stage * 2 + WHO).reshape([ROWS, 128])
    shared = w_bufs.index(second * 2).reshape([ROWS, 128])
    h = x_bufs.index(stage)
    rest = x_bufs.index(second).slice(0, 64, 1).permute((1, 0))
    if WHO == 0:
        acc = warpgroup_mma(outer, h.permute((1, 0)), acc, use_acc=False, is_async=True)
        mbarrier.wait(full.index(second), second_phase)
        acc = warpgroup_mma(shared.slice(0, 64, 1), rest, acc, use_acc=True, is_async=True)
    else:
        acc = warpgroup_mma(
            outer.slice(0, 64, 1), h.slice(64, 64, 1).permute((1, 0)), acc, use_acc=False, is_async=True
        )
        mbarrier.wait(full.index(second), second_phase)
        acc = warpgroup_mma(outer.slice(64, 64, 1), rest, acc, use_acc=True, is_async=True)
        acc = warpgroup_mma(
            shared.slice(64, 64, 1), h.slice(0, 64, 1).permute((1, 0)), acc, use_acc=True, is_async=True
        )
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(stage), count=1)
    mbarrier.arrive(empty.index(second), count=1)
    stage, phase = advance(second, second_phase, STAGES)
    return acc, stage, phase
