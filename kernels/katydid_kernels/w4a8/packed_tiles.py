"""Tiles of D^T = W X^T: W unpacked from int4 into the registers wgmma reads, 64 rows a warpgroup, tokens as columns.

A stage of the ring holds one group of 128 columns or, for few tokens, two: codes and scales of each warpgroup's rows,
and the token rows in e4m3. Two groups are two products in flight, the second unpacked while the first multiplies; each
leaves the tensor cores for its group's scale and a sum in fp32. The format is `packing`'s.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from katydid_kernels.gemm.ring import advance

__all__ = ["accumulator_layout", "fetch_weights", "multiply_halves", "multiply_packed", "strip_of", "weight_buffers"]


@gluon.constexpr_function
def accumulator_layout(tokens):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 32])


@gluon.jit
def weight_buffers(codes_desc, scales_desc, STAGES: gl.constexpr, WGS: gl.constexpr):
    """Codes and scales of every stage and warpgroup."""
    LINES: gl.constexpr = codes_desc.block_type.shape[1]
    codes = gl.allocate_shared_memory(codes_desc.dtype, [STAGES * WGS, 1, LINES, 128], codes_desc.layout)
    SCALES: gl.constexpr = scales_desc.block_type.shape[0]
    return codes, gl.allocate_shared_memory(scales_desc.dtype, [STAGES * WGS, SCALES], scales_desc.layout)


@gluon.jit
def strip_of(expert, strip, strips):
    """Where an expert's strip stands; outside of everything, where nothing is read, if it has not that many."""
    return gl.where(strip < strips, expert * strips + strip, 0x7FFFFF)


@gluon.jit
def fetch_weights(codes_desc, scales_desc, strip, k, groups, bar, codes, scales, place):
    """Copy stage k of a strip: past the last column codes are zero, and scales whatever stands there."""
    GROUPS: gl.constexpr = codes_desc.block_type.shape[1] // 32
    tma.async_copy_global_to_shared(codes_desc, [strip, k * (GROUPS * 32), 0], bar, codes.index(place))
    tma.async_copy_global_to_shared(scales_desc, [(strip * groups + k * GROUPS) * 64], bar, scales.index(place))


@gluon.jit
def _unpack(lines, TOKENS: gl.constexpr):
    """The e4m3 operand ``[64, 128]`` of 32 lines of codes, each thread's words where it needs them."""
    low, high = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 w, sign, rest;
        and.b32 sign, $2, 0x80808080;
        and.b32 rest, $2, 0x87878787;
        shr.u32 sign, sign, 7;
        add.u32 $0, rest, sign;
        shf.r.wrap.b32 w, $2, $2, 4;
        and.b32 sign, w, 0x80808080;
        and.b32 rest, w, 0x87878787;
        shr.u32 sign, sign, 7;
        add.u32 $1, rest, sign;
        }
        """,
        "=&r,=r,r",
        [lines],
        dtype=(gl.uint8, gl.uint8),
        is_pure=True,
        pack=4,
    )
    # Unit, warp, the three bits of g, q, j, byte, half -> warp, half, g | unit, j, q, byte.
    both = gl.join(low, high).reshape([2, 4, 4, 2, 4, 4, 4, 2]).permute((1, 7, 2, 3, 0, 5, 4, 6)).reshape([64, 128])
    layout: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(TOKENS), 4)
    return gl.convert_layout(both, layout, assert_trivial=True).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _operand(codes, TOKENS: gl.constexpr):
    lines: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    return _unpack(codes.load(lines), TOKENS)


@gluon.jit
def _product(a, x, first, TOKENS: gl.constexpr):
    part = gl.zeros([64, TOKENS], gl.float32, accumulator_layout(TOKENS))
    return warpgroup_mma(a, x.slice(first, TOKENS).permute((1, 0)), part, use_acc=False, is_async=True)


@gluon.jit
def _scale(scales, group: gl.constexpr, TOKENS: gl.constexpr):
    return scales.slice(group * 64, 64).load(gl.SliceLayout(1, accumulator_layout(TOKENS))).to(gl.float32)[:, None]


@gluon.jit
def multiply_packed(
    WHO: gl.constexpr, ring, stage, phase, steps, TOKENS: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr,
    GATHERED: gl.constexpr,
):  # fmt: skip
    """The product of `steps` stages of two groups with the first TOKENS rows of x, ``[64, TOKENS]``,
    `packing.CODE_SCALE` times too small; and the place in the ring after them."""
    x_bufs, codes_bufs, scales_bufs, full, empty = ring
    acc = gl.zeros([64, TOKENS], gl.float32, accumulator_layout(TOKENS))
    for _ in range(steps):
        mbarrier.wait(full.index(stage), phase)
        if GATHERED:
            # cp.async writes through the generic proxy, wgmma reads through the async one.
            fence_async_shared()
        codes = codes_bufs.index(stage * WGS + WHO).reshape([64, 128])
        scales = scales_bufs.index(stage * WGS + WHO)
        first_scale = _scale(scales, 0, TOKENS)
        second_scale = _scale(scales, 1, TOKENS)
        first = _product(_operand(codes.slice(0, 32), TOKENS), x_bufs.index(stage * 2), 0, TOKENS)
        second = _product(_operand(codes.slice(32, 32), TOKENS), x_bufs.index(stage * 2 + 1), 0, TOKENS)
        first = warpgroup_mma_wait(1, deps=(first,))
        acc += first * first_scale
        second = warpgroup_mma_wait(0, deps=(second,))
        mbarrier.arrive(empty.index(stage), count=1)
        acc += second * second_scale
        stage, phase = advance(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def multiply_halves(WHO: gl.constexpr, ring, stage, phase, steps, STAGES: gl.constexpr, WGS: gl.constexpr):
    """The same of `steps` stages of one group with 128 rows of x, half of them at a time to fit the registers."""
    x_bufs, codes_bufs, scales_bufs, full, empty = ring
    left = gl.zeros([64, 64], gl.float32, accumulator_layout(64))
    right = gl.zeros([64, 64], gl.float32, accumulator_layout(64))
    for _ in range(steps):
        mbarrier.wait(full.index(stage), phase)
        fence_async_shared()
        a = _operand(codes_bufs.index(stage * WGS + WHO).reshape([32, 128]), 64)
        scale = _scale(scales_bufs.index(stage * WGS + WHO), 0, 64)
        part = _product(a, x_bufs.index(stage), 0, 64)
        part = warpgroup_mma_wait(0, deps=(part,))
        left += part * scale
        part = _product(a, x_bufs.index(stage), 64, 64)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(stage), count=1)
        right += part * scale
        stage, phase = advance(stage, phase, STAGES)
    return left, right, stage, phase
