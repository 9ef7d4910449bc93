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
    "flush_groups",
    "multiply_halves",
    "multiply_packed",
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
def copy_groups(x_bufs, full, stage, sent, source, k, columns, valid, STAGES: gl.constexpr, LAG: gl.constexpr):
    """Copy both groups of the valid token rows to a stage; past the last column, where codes are zero, any. The rows of
    the stage LAG before have then landed, and are handed over: `sent` counts the stages since the last `flush_groups`.

    cp.async writes through the generic proxy and wgmma reads through the async one. The fence between is here, because
    consumers have less time than whoever copies for them.
    """
    for group in gl.static_range(2):
        col = gl.minimum(k * 256 + group * 128, columns - 128)
        async_copy.async_copy_global_to_shared(x_bufs.index(stage * 2 + group), source + col, mask=valid)
    async_copy.commit_group()
    async_copy.wait_group(LAG)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(full.index(_back(stage, LAG, STAGES)), count=1, pred=sent >= LAG)
    return sent + 1


@gluon.jit
def flush_groups(full, stage, sent, STAGES: gl.constexpr, LAG: gl.constexpr):
    """Hand over what `copy_groups` has not, `stage` being the next one."""
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    for i in gl.static_range(LAG):
        mbarrier.arrive(full.index(_back(stage, LAG - i, STAGES)), count=1, pred=sent >= LAG - i)


@gluon.jit
def _back(stage, n: gl.constexpr, STAGES: gl.constexpr):
    return gl.where(stage >= n, stage - n, stage - n + STAGES)


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
def multiply_packed(
    WHO: gl.constexpr, ring, stage, phase, steps, TOKENS: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr
):  # fmt: skip
    """The product of `steps` stages with the first TOKENS rows of x, ``[64, TOKENS]``, `packing.CODE_SCALE` times too
    small; and the place in the ring after them."""
    x_bufs, codes_bufs, scales_bufs, full, empty = ring
    acc = gl.zeros([64, TOKENS], gl.float32, accumulator_layout(TOKENS))
    for _ in range(steps):
        mbarrier.wait(full.index(stage), phase)
        codes = codes_bufs.index(stage * WGS + WHO).reshape([64, 128])
        scales = scales_bufs.index(stage * WGS + WHO)
        first_scale = _scale(scales, 0, TOKENS)
        second_scale = _scale(scales, 1, TOKENS)
        first = _product(codes.slice(0, 32), x_bufs.index(stage * 2), TOKENS)
        second = _product(codes.slice(32, 32), x_bufs.index(stage * 2 + 1), TOKENS)
        first = warpgroup_mma_wait(1, deps=(first,))
        acc += first * first_scale
        second = warpgroup_mma_wait(0, deps=(second,))
        mbarrier.arrive(empty.index(stage), count=1)
        acc += second * second_scale
        stage, phase = advance(stage, phase, STAGES)
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
