"""What the expert kernels share: tiles of D^T = W X^T, with the weights as wgmma's rows and tokens as its columns.

A few tokens then waste nothing: wgmma's columns go down to 8, its rows are always 64. The token rows are read through
an index, 16 bytes a thread by cp.async, which counts into the same mbarrier as the TMA of the weights.

Gate and up rows are interleaved eight by eight as TMA fetches them from ``w13[E, 2 * I, K]`` (a view with the halves as
an inner dimension), so a thread's accumulator holds the gate and the up of one (expert column, token) side by side and
SwiGLU moves nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from katydid_kernels.gemm.ring import advance, before

__all__ = [
    "accumulator_layout",
    "copy_rows",
    "copy_scales",
    "gather",
    "multiply",
    "multiply_blocks",
    "row_layout",
    "scaled_swiglu",
    "stage_operands",
    "store_columns",
    "tokens_of",
]


@gluon.constexpr_function
def row_layout(block_k, bits):
    """How a warpgroup copies rows of `block_k` elements: 16 bytes a thread, a row on as few lanes as it needs."""
    vector = 128 // bits
    lanes = block_k // vector
    return gl.BlockedLayout([1, vector], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.constexpr_function
def accumulator_layout(tokens, bits):
    """A warpgroup's accumulator: 16 weight rows a warp, all the tokens, operands of `bits` bits."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 256 // bits])


@gluon.jit
def tokens_of(rows, end, rows_ptr, TOP_K: gl.constexpr):
    """The tokens of sorted rows, or of pairs in their own order where rows_ptr is None; past `end` the last one's."""
    rows = gl.minimum(rows, gl.maximum(end - 1, 0))
    return rows // TOP_K if rows_ptr is None else gl.load(rows_ptr + rows)


@gluon.jit
def gather(base, rows, stride, cols):
    """Addresses of `cols` of the given rows."""
    return base + rows.to(gl.int64)[:, None] * stride + cols[None, :]


@gluon.jit
def copy_rows(buffer, source, valid, barrier):
    """Copy the valid token rows into a stage; each of 128 threads arrives at its barrier, if one is given, when all its
    copies so far have landed.

    The other rows keep what they held: they only reach columns of the product that are never stored.
    """
    async_copy.async_copy_global_to_shared(buffer, source, mask=valid)
    if barrier is not None:
        async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def multiply(
    WHO: gl.constexpr, ring, stage, phase, steps, ROWS: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    WGS: gl.constexpr, PROMOTE: gl.constexpr, GATHERED: gl.constexpr, AT_ONCE: gl.constexpr = 1,
):  # fmt: skip
    """The product of `steps` stages with the first TOKENS rows of x, ``[ROWS, TOKENS]`` for ROWS weight rows; and the
    place in the ring after them.

    AT_ONCE: how many stages (1, 2 or 4) to multiply before waiting for the first, where each has an accumulator of its
    own (PROMOTE); it divides `steps`. With few tokens a stage's time is latency, which they share.
    """
    _, _, full, empty = ring
    layout: gl.constexpr = accumulator_layout(TOKENS, ring[0].dtype.primitive_bitwidth)
    acc = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    if PROMOTE and AT_ONCE == 2:
        for _ in range(0, steps, 2):
            second, second_phase = advance(stage, phase, STAGES)
            part = _multiply_stage(WHO, ring, stage, phase, ROWS, TOKENS, WGS, GATHERED)
            other = _multiply_stage(WHO, ring, second, second_phase, ROWS, TOKENS, WGS, GATHERED)
            part, other = warpgroup_mma_wait(0, deps=(part, other))
            mbarrier.arrive(empty.index(stage), count=1)
            mbarrier.arrive(empty.index(second), count=1)
            acc += part
            acc += other
            stage, phase = advance(second, second_phase, STAGES)
    elif PROMOTE and AT_ONCE == 4:
        for _ in range(0, steps, 4):
            second, second_phase = advance(stage, phase, STAGES)
            third, third_phase = advance(second, second_phase, STAGES)
            fourth, fourth_phase = advance(third, third_phase, STAGES)
            a = _multiply_stage(WHO, ring, stage, phase, ROWS, TOKENS, WGS, GATHERED)
            b = _multiply_stage(WHO, ring, second, second_phase, ROWS, TOKENS, WGS, GATHERED)
            c = _multiply_stage(WHO, ring, third, third_phase, ROWS, TOKENS, WGS, GATHERED)
            d = _multiply_stage(WHO, ring, fourth, fourth_phase, ROWS, TOKENS, WGS, GATHERED)
            a, b, c, d = warpgroup_mma_wait(0, deps=(a, b, c, d))
            mbarrier.arrive(empty.index(stage), count=1)
            mbarrier.arrive(empty.index(second), count=1)
            mbarrier.arrive(empty.index(third), count=1)
            mbarrier.arrive(empty.index(fourth), count=1)
            acc += (a + b) + (c + d)
            stage, phase = advance(fourth, fourth_phase, STAGES)
    elif PROMOTE:
        for _ in range(steps):
            part = _multiply_stage(WHO, ring, stage, phase, ROWS, TOKENS, WGS, GATHERED)
            part = warpgroup_mma_wait(0, deps=(part,))
            mbarrier.arrive(empty.index(stage), count=1)
            acc += part
            stage, phase = advance(stage, phase, STAGES)
    else:
        for k in range(steps):
            mbarrier.wait(full.index(stage), phase)
            w, x = stage_operands(WHO, ring, stage, ROWS, TOKENS, WGS, GATHERED)
            acc = warpgroup_mma(w, x, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=k > 0)
            stage, phase = advance(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
    return acc, stage, phase


@gluon.jit
def stage_operands(
    WHO: gl.constexpr, ring, stage, ROWS: gl.constexpr, TOKENS: gl.constexpr, WGS: gl.constexpr, GATHERED: gl.constexpr
):
    x_bufs, w_bufs, _, _ = ring
    if GATHERED:
        # cp.async writes through the generic proxy, wgmma reads through the async one.
        fence_async_shared()
    w = w_bufs.index(stage * WGS + WHO).reshape([ROWS, x_bufs.type.shape[2]])
    return w, x_bufs.index(stage).slice(0, TOKENS).permute((1, 0))


@gluon.jit
def _multiply_stage(
    WHO: gl.constexpr, ring, stage, phase, ROWS: gl.constexpr, TOKENS: gl.constexpr, WGS: gl.constexpr,
    GATHERED: gl.constexpr,
):  # fmt: skip
    """Start one stage's product in an accumulator of its own."""
    mbarrier.wait(ring[2].index(stage), phase)
    w, x = stage_operands(WHO, ring, stage, ROWS, TOKENS, WGS, GATHERED)
    part = gl.zeros([ROWS, TOKENS], gl.float32, accumulator_layout(TOKENS, ring[0].dtype.primitive_bitwidth))
    return warpgroup_mma(w, x, part, use_acc=False, is_async=True)


@gluon.jit
def copy_scales(buffer, source, valid, barrier):
    """Copy a scale of each token row into a stage; arrives as `copy_rows` does."""
    async_copy.async_copy_global_to_shared(buffer, source, mask=valid)
    if barrier is not None:
        async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def multiply_blocks(
    WHO: gl.constexpr, ring, scale_bufs, weight_scales, stage, phase, steps, ROWS: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, WGS: gl.constexpr, GATHERED: gl.constexpr,
):  # fmt: skip
    """`multiply` with scales of blocks: the tokens' in scale_bufs, ``[STAGES, tokens]``, and the weights' at two
    addresses, of gate rows and up rows, or twice the same."""
    empty = ring[3]
    gate_ptr, up_ptr = weight_scales
    layout: gl.constexpr = accumulator_layout(TOKENS, ring[0].dtype.primitive_bitwidth)
    is_up = gl.arange(0, ROWS, gl.SliceLayout(1, layout)) // 8 % 2 == 1
    acc = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    for k in range(steps):
        # Asked for here, the weights' scales arrive while the stage multiplies.
        gate = gl.load(gate_ptr + k)
        up = gl.load(up_ptr + k)
        part = _multiply_stage(WHO, ring, stage, phase, ROWS, TOKENS, WGS, GATHERED)
        tokens = scale_bufs.index(stage).slice(0, TOKENS).load(gl.SliceLayout(0, layout))
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(stage), count=1)
        acc += part * (gl.where(is_up, up, gate)[:, None] * tokens[None, :])
        stage, phase = advance(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def scaled_swiglu(acc, gate_scale, up_scale, row, end, token_scale_ptr, rows_ptr, TOP_K: gl.constexpr):
    """``silu(gate) * up`` of an interleaved accumulator, each scaled, as ``[ROWS / 2, TOKENS]``.

    token_scale_ptr: fp32 ``[T]`` or None.
    """
    GROUPS: gl.constexpr = acc.shape[0] // 16
    TOKENS: gl.constexpr = acc.shape[1]
    if token_scale_ptr is not None:
        columns: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
        token = tokens_of(row + gl.arange(0, TOKENS, columns), end, rows_ptr, TOP_K)
        acc *= gl.load(token_scale_ptr + token)[None, :]
    gate, up = acc.reshape([GROUPS, 2, 8, TOKENS]).permute((0, 2, 3, 1)).split()
    gate *= gate_scale
    h = gate / (1.0 + gl.exp(-gate)) * (up * up_scale)
    return h.reshape([GROUPS * 8, TOKENS])


@gluon.jit
def store_columns(value, ptr, stride, row, end, col, layout: gl.constexpr):
    """Store ``value[n, TOKENS]`` transposed, token by token, to ``ptr[row:, col:]`` up to row `end`."""
    if ptr.dtype.element_ty == gl.float8e4nv:
        # e4m3 has no infinity: what exceeds its range must be clamped or it becomes NaN.
        value = gl.minimum(gl.maximum(value, -448.0), 448.0)
    value = gl.convert_layout(value.to(ptr.dtype.element_ty), layout)
    rows = row + gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    cols = col + gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
    gl.store(ptr + rows.to(gl.int64)[None, :] * stride + cols[:, None], value, mask=(rows < end)[None, :])
