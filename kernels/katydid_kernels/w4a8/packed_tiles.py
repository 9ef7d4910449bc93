"""Tiles of D^T = W X^T: W unpacked from int4 into the registers wgmma reads, 64 rows a warpgroup, tokens as columns.

A stage of the ring holds 256 columns: 8 KiB of codes a warpgroup, their scales, and the token rows in e4m3. The two
groups of a stage are two products in flight, the second unpacked while the first multiplies; each leaves the tensor
cores for its group's scale and a sum in fp32. The format is `packing`'s.
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

__all__ = ["STAGE_K", "accumulator_layout", "fetch_weights", "multiply_packed", "weight_buffers"]

STAGE_K = gl.constexpr(256)


@gluon.constexpr_function
def accumulator_layout(tokens):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 32])


@gluon.jit
def weight_buffers(codes_desc, scales_desc, STAGES: gl.constexpr, WGS: gl.constexpr):
    """Codes and scales of every stage and warpgroup."""
    codes = gl.allocate_shared_memory(codes_desc.dtype, [STAGES * WGS, 1, 64, 128], codes_desc.layout)
    return codes, gl.allocate_shared_memory(scales_desc.dtype, [STAGES * WGS, 128], scales_desc.layout)


@gluon.jit
def fetch_weights(codes_desc, scales_desc, strip, k, groups, bar, codes, scales, place):
    """Copy stage k of a strip: past the last column codes are zero, and scales whatever stands there."""
    tma.async_copy_global_to_shared(codes_desc, [strip, k * 64, 0], bar, codes.index(place))
    tma.async_copy_global_to_shared(scales_desc, [(strip * groups + k * 2) * 64], bar, scales.index(place))


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
def _product(codes, x, TOKENS: gl.constexpr):
    lines: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    part = gl.zeros([64, TOKENS], gl.float32, accumulator_layout(TOKENS))
    a = _unpack(codes.load(lines), TOKENS)
    return warpgroup_mma(a, x.slice(0, TOKENS).permute((1, 0)), part, use_acc=False, is_async=True)


@gluon.jit
def multiply_packed(
    WHO: gl.constexpr, ring, stage, phase, steps, TOKENS: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr,
    GATHERED: gl.constexpr,
):  # fmt: skip
    """The product of `steps` stages with the first TOKENS rows of x, ``[64, TOKENS]``, `packing.CODE_SCALE` times too
    small; and the place in the ring after them."""
    x_bufs, codes_bufs, scales_bufs, full, empty = ring
    layout: gl.constexpr = accumulator_layout(TOKENS)
    acc = gl.zeros([64, TOKENS], gl.float32, layout)
    for _ in range(steps):
        mbarrier.wait(full.index(stage), phase)
        if GATHERED:
            # cp.async writes through the generic proxy, wgmma reads through the async one.
            fence_async_shared()
        place = stage * WGS + WHO
        codes = codes_bufs.index(place).reshape([64, 128])
        scales = scales_bufs.index(place)
        first_scale = scales.slice(0, 64).load(gl.SliceLayout(1, layout)).to(gl.float32)
        second_scale = scales.slice(64, 64).load(gl.SliceLayout(1, layout)).to(gl.float32)
        first = _product(codes.slice(0, 32), x_bufs.index(stage * 2), TOKENS)
        second = _product(codes.slice(32, 32), x_bufs.index(stage * 2 + 1), TOKENS)
        first = warpgroup_mma_wait(1, deps=(first,))
        acc += first * first_scale[:, None]
        second = warpgroup_mma_wait(0, deps=(second,))
        mbarrier.arrive(empty.index(stage), count=1)
        acc += second * second_scale[:, None]
        stage, phase = advance(stage, phase, STAGES)
    return acc, stage, phase
