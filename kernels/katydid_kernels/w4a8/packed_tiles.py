"""Tiles of D^T = W X^T: W unpacked from int4 into the registers wgmma reads, 64 rows a warpgroup, tokens as columns.

A stage of the ring holds two groups of 128 columns: codes and scales of each warpgroup's rows, and the token rows in
e4m3. Two products are in flight, the second group unpacked while the first multiplies; each leaves the tensor cores for
its group's scale and a sum in fp32. The format is `packing`'s.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from katydid_kernels.gemm.ring import advance

__all__ = [
    "accumulator_layout",
    "copy_groups",
    "fetch_weights",
    "multiply_halves",
    "multiply_one",
    "multiply_packed",
    "multiply_two",
    "strip_of",
    "weight_buffers",
]


@gluon.constexpr_function
def accumulator_layout(tokens):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 32])


@gluon.jit
def weight_buffers(codes_desc, scales_desc, STAGES: gl.constexpr, WGS: gl.constexpr):
    """Codes and scales of every stage and warpgroup."""
    codes = gl.allocate_shared_memory(codes_desc.dtype, [STAGES * WGS, 1, 64, 128], codes_desc.layout)
    return codes, gl.allocate_shared_memory(scales_desc.dtype, [STAGES * WGS, 128], scales_desc.layout)


@gluon.jit
def strip_of(expert, strip, strips):
    """Where an expert's strip stands; outside of everything, where nothing is read, if it has not that many."""
    return gl.where(strip < strips, expert * strips + strip, 0x7FFFFF)


@gluon.jit
def fetch_weights(codes_desc, scales_desc, strip, k, groups, bar, codes, scales, place):
    """Copy stage k of a strip: past the last column codes are zero, and scales whatever stands there."""
    tma.async_copy_global_to_shared(codes_desc, [strip, k * 64, 0], bar, codes.index(place))
    tma.async_copy_global_to_shared(scales_desc, [(strip * groups + k * 2) * 64], bar, scales.index(place))


@gluon.jit
def copy_groups(x_bufs, stage, source, k, columns, valid, bar):
    """Copy both groups of the valid token rows, as `gemm.expert_tiles.copy_rows`; past the last column, where codes are
    zero, any."""
    for group in gl.static_range(2):
        col = gl.minimum(k * 256 + group * 128, columns - 128)
        async_copy.async_copy_global_to_shared(x_bufs.index(stage * 2 + group), source + col, mask=valid)
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _signed(lines):
    """The e4m3 bytes of both halves of every byte of codes: magnitudes by nibbles, then their signs put back."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 sign, ones, sevens, low, high;
        and.b32 sign, $2, 0x88888888;
        shr.u32 ones, sign, 3;
        mul.lo.u32 sevens, ones, 7;
        lop3.b32 low, $2, 0x77777777, sevens, 0x6a;
        add.u32 low, low, ones;
        shl.b32 ones, sign, 4;
        shr.u32 high, low, 4;
        lop3.b32 $0, low, ones, 0x0f0f0f0f, 0xe4;
        lop3.b32 $1, high, sign, 0x0f0f0f0f, 0xe4;
        }
        """,
        "=&r,=r,r",
        [lines],
        dtype=(gl.uint8, gl.uint8),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _raised(lines):
    """The same eight too large, in three instructions a word."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 high;
        shr.u32 high, $2, 4;
        lop3.b32 $0, $2, 0x0f0f0f0f, 0x08080808, 0x6a;
        lop3.b32 $1, high, 0x0f0f0f0f, 0x08080808, 0x6a;
        }
        """,
        "=&r,=r,r",
        [lines],
        dtype=(gl.uint8, gl.uint8),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def _operand(codes, TOKENS: gl.constexpr, RAISED: gl.constexpr):
    """The e4m3 operand ``[64, 128]`` of 32 lines of codes, each thread's words where it needs them."""
    lines = codes.load(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
    low, high = _raised(lines) if RAISED else _signed(lines)
    # Unit, warp, the three bits of g, q, j, byte, half -> warp, half, g | unit, j, q, byte.
    both = gl.join(low, high).reshape([2, 4, 4, 2, 4, 4, 4, 2]).permute((1, 7, 2, 3, 0, 5, 4, 6)).reshape([64, 128])
    layout: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(TOKENS), 4)
    return gl.convert_layout(both, layout, assert_trivial=True).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _product(codes, x, TOKENS: gl.constexpr):
    """One group's product, in flight."""
    layout: gl.constexpr = accumulator_layout(TOKENS)
    RAISED: gl.constexpr = TOKENS <= 32
    columns = x.slice(0, TOKENS).permute((1, 0))
    part = gl.zeros([64, TOKENS], gl.float32, layout)
    if RAISED:
        # With few tokens the tensor cores have time to take off what `_raised` saves: eight times the sum of x, which
        # they can do before the codes are unpacked. 0x88 is -8 as a code is 8.
        eights = gl.full([64, 128], 0x88, gl.uint8, gl.DotOperandLayout(0, layout, 4)).to(gl.float8e4nv, bitcast=True)
        part = warpgroup_mma(eights, columns, part, use_acc=False, is_async=True)
    return warpgroup_mma(_operand(codes, TOKENS, RAISED), columns, part, use_acc=RAISED, is_async=True)


@gluon.jit
def _scale(scales, group: gl.constexpr, TOKENS: gl.constexpr):
    return scales.slice(group * 64, 64).load(gl.SliceLayout(1, accumulator_layout(TOKENS))).to(gl.float32)[:, None]


@gluon.jit
def _start(WHO: gl.constexpr, ring, stage, phase, TOKENS: gl.constexpr, WGS: gl.constexpr, GATHERED: gl.constexpr):
    """The products of a stage's two groups, in flight, and their scales."""
    x_bufs, codes_bufs, scales_bufs, full, _ = ring
    mbarrier.wait(full.index(stage), phase)
    if GATHERED:
        # cp.async writes through the generic proxy, wgmma reads through the async one.
        fence_async_shared()
    codes = codes_bufs.index(stage * WGS + WHO).reshape([64, 128])
    scales = scales_bufs.index(stage * WGS + WHO)
    first_scale = _scale(scales, 0, TOKENS)
    second_scale = _scale(scales, 1, TOKENS)
    first = _product(codes.slice(0, 32), x_bufs.index(stage * 2), TOKENS)
    second = _product(codes.slice(32, 32), x_bufs.index(stage * 2 + 1), TOKENS)
    return first, second, first_scale, second_scale


@gluon.jit
def multiply_one(
    WHO: gl.constexpr, ring, stage, phase, TOKENS: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr,
    GATHERED: gl.constexpr,
):  # fmt: skip
    """The product of one stage, as `multiply_packed`."""
    first, second, first_scale, second_scale = _start(WHO, ring, stage, phase, TOKENS, WGS, GATHERED)
    first = warpgroup_mma_wait(1, deps=(first,))
    acc = first * first_scale
    second = warpgroup_mma_wait(0, deps=(second,))
    mbarrier.arrive(ring[4].index(stage), count=1)
    acc += second * second_scale
    stage, phase = advance(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def multiply_two(
    WHO: gl.constexpr, ring, stage, phase, TOKENS: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr,
    GATHERED: gl.constexpr,
):  # fmt: skip
    """The products of two stages, each by itself: with few tokens a stage's time is latency, which two share."""
    next_stage, next_phase = advance(stage, phase, STAGES)
    a, b, a_scale, b_scale = _start(WHO, ring, stage, phase, TOKENS, WGS, GATHERED)
    c, d, c_scale, d_scale = _start(WHO, ring, next_stage, next_phase, TOKENS, WGS, GATHERED)
    a, b, c, d = warpgroup_mma_wait(0, deps=(a, b, c, d))
    mbarrier.arrive(ring[4].index(stage), count=1)
    mbarrier.arrive(ring[4].index(next_stage), count=1)
    stage, phase = advance(next_stage, next_phase, STAGES)
    return a * a_scale + b * b_scale, c * c_scale + d * d_scale, stage, phase


@gluon.jit
def multiply_packed(
    WHO: gl.constexpr, ring, stage, phase, steps, TOKENS: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr,
    GATHERED: gl.constexpr,
):  # fmt: skip
    """The product of `steps` stages with the first TOKENS rows of x, ``[64, TOKENS]``, `packing.CODE_SCALE` times too
    small; and the place in the ring after them."""
    acc = gl.zeros([64, TOKENS], gl.float32, accumulator_layout(TOKENS))
    if TOKENS <= 16:
        for _ in range(steps // 2):
            first, second, stage, phase = multiply_two(WHO, ring, stage, phase, TOKENS, STAGES, WGS, GATHERED)
            acc += first
            acc += second
        if steps % 2 == 1:
            last, stage, phase = multiply_one(WHO, ring, stage, phase, TOKENS, STAGES, WGS, GATHERED)
            acc += last
    else:
        for _ in range(steps):
            one, stage, phase = multiply_one(WHO, ring, stage, phase, TOKENS, STAGES, WGS, GATHERED)
            acc += one
    return acc, stage, phase


@gluon.jit
def _half(a, x, half: gl.constexpr):
    part = gl.zeros([64, 64], gl.float32, accumulator_layout(64))
    return warpgroup_mma(a, x.slice(half * 64, 64).permute((1, 0)), part, use_acc=False, is_async=True)


@gluon.jit
def multiply_halves(WHO: gl.constexpr, ring, stage, phase, steps, STAGES: gl.constexpr, WGS: gl.constexpr):
    """The same with 128 rows of x, as left and right half: two halves of a product are in flight while the group before
    is scaled and the next one unpacked."""
    x_bufs, codes_bufs, scales_bufs, full, empty = ring
    left = gl.zeros([64, 64], gl.float32, accumulator_layout(64))
    right = gl.zeros([64, 64], gl.float32, accumulator_layout(64))
    for _ in range(steps):
        mbarrier.wait(full.index(stage), phase)
        fence_async_shared()
        codes = codes_bufs.index(stage * WGS + WHO).reshape([64, 128])
        scales = scales_bufs.index(stage * WGS + WHO)
        first_scale = _scale(scales, 0, 64)
        second_scale = _scale(scales, 1, 64)
        a = _operand(codes.slice(0, 32), 64, False)
        first_left = _half(a, x_bufs.index(stage * 2), 0)
        first_right = _half(a, x_bufs.index(stage * 2), 1)
        a = _operand(codes.slice(32, 32), 64, False)
        first_left = warpgroup_mma_wait(1, deps=(first_left,))
        second_left = _half(a, x_bufs.index(stage * 2 + 1), 0)
        left += first_left * first_scale
        first_right = warpgroup_mma_wait(1, deps=(first_right,))
        second_right = _half(a, x_bufs.index(stage * 2 + 1), 1)
        right += first_right * first_scale
        second_left = warpgroup_mma_wait(1, deps=(second_left,))
        left += second_left * second_scale
        second_right = warpgroup_mma_wait(0, deps=(second_right,))
        mbarrier.arrive(empty.index(stage), count=1)
        right += second_right * second_scale
        stage, phase = advance(stage, phase, STAGES)
    return left, right, stage, phase
