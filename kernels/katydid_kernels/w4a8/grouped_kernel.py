"""Grouped GEMM of packed int4 for many tokens: gate-up with SwiGLU and quantisation, or down, as one persistent kernel.

A CTA's tile is two strips of an expert's weight by 128 of its rows, over all of K. The weights come from L2 at
half the bytes of fp8, and are unpacked once a tile; the token rows are read through the index and never gathered into
memory. One dense weight is one
expert with the rows in their own order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from katydid_kernels.gemm.expert_tiles import gather, row_layout, scaled_swiglu, store_columns, tokens_of
from katydid_kernels.gemm.narrow_kernel import finish_columns
from katydid_kernels.gemm.ring import advance, launch_next, make_barriers, wait_for_last
from katydid_kernels.w4a8.packed_tiles import (
    copy_groups,
    fetch_weights,
    flush_groups,
    multiply_halves,
    strip_of,
    weight_buffers,
)

__all__ = ["grouped_w4a8_kernel"]


@gluon.jit
def _tile_of(item, tiles_n, tiles_ptr, M):
    """Expert, first row, and end of the expert's rows."""
    if tiles_ptr is None:
        expert = 0
        row = item // tiles_n * 128
        end = M
    else:
        entry = tiles_ptr + item // tiles_n * 4
        expert = gl.load(entry)
        row = gl.load(entry + 1)
        end = gl.load(entry + 2)
    return expert, row, end


@gluon.jit
def _produce(x, weight, rows_ptr, tiles_ptr, ring, shape, M, STAGES: gl.constexpr, WGS: gl.constexpr):
    x_ptr, x_stride, columns = x
    codes_desc, scales_desc, strips, groups = weight
    x_bufs, codes, scales, full, empty = ring
    items, tiles_n, tiles_k = shape
    BYTES: gl.constexpr = WGS * (codes_desc.block_type.nbytes + scales_desc.block_type.nbytes)
    layout: gl.constexpr = row_layout(128, 8)
    cols = gl.arange(0, 128, gl.SliceLayout(0, layout))
    lane = gl.arange(0, 128, gl.SliceLayout(1, layout))
    LAG: gl.constexpr = 1
    stage = 0
    phase = 1
    sent = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        expert, row, end = _tile_of(item, tiles_n, tiles_ptr, M)
        rows = row + lane
        valid = (rows < end)[:, None]
        source = gather(x_ptr, rows if rows_ptr is None else tokens_of(rows, end, rows_ptr, 1), x_stride, cols)
        for k in range(tiles_k):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, BYTES)
            for part in gl.static_range(WGS):
                strip = strip_of(expert, item % tiles_n * WGS + part, strips)
                fetch_weights(codes_desc, scales_desc, strip, k, groups, bar, codes, scales, stage * WGS + part)
            sent = copy_groups(x_bufs, full, stage, sent, source, k, columns, valid, STAGES, LAG)
            stage, phase = advance(stage, phase, STAGES)
    flush_groups(full, stage, sent, STAGES, LAG)


@gluon.jit
def _consume(
    WHO: gl.constexpr, out, hooks, rows_ptr, tiles_ptr, ring, shape, limits,
    STAGES: gl.constexpr, WGS: gl.constexpr, GATED: gl.constexpr, X_SCALE_STEP: gl.constexpr,
):  # fmt: skip
    items, tiles_n, tiles_k = shape
    M, N, strips = limits
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        _, row, end = _tile_of(item, tiles_n, tiles_ptr, M)
        left, right, stage, phase = multiply_halves(WHO, ring, stage, phase, tiles_k, STAGES, WGS)
        strip = item % tiles_n * WGS + WHO
        if strip < strips:
            _store(left, row, end, strip, N, out, hooks, rows_ptr, GATED, tiles_ptr is None, X_SCALE_STEP)
            if row + 64 < end:
                _store(right, row + 64, end, strip, N, out, hooks, rows_ptr, GATED, tiles_ptr is None, X_SCALE_STEP)


@gluon.jit
def _store(
    acc, row, end, strip, N, out, hooks, rows_ptr,
    GATED: gl.constexpr, DENSE: gl.constexpr, X_SCALE_STEP: gl.constexpr,
):  # fmt: skip
    out_ptr, out_stride = out
    x_scale_ptr, h_scale_ptr, bias_ptr, residual_ptr, residual_stride = hooks
    if DENSE:
        start = row.to(gl.int64)
        if residual_ptr is not None:
            residual_ptr += start * residual_stride
        target = (out_ptr + start * out_stride, out_stride, end - row, N)
        finish = (x_scale_ptr + row * X_SCALE_STEP, X_SCALE_STEP, None, 0, bias_ptr, residual_ptr, residual_stride)
        finish_columns(acc * 512.0, strip * 64, target, finish)
    elif GATED:
        scale = 512.0
        if X_SCALE_STEP == 0:
            scale = 512.0 * gl.load(x_scale_ptr)
        token_scale_ptr = None if X_SCALE_STEP == 0 else x_scale_ptr
        layout: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
        h = scaled_swiglu(acc, scale, scale / gl.load(h_scale_ptr), row, end, token_scale_ptr, rows_ptr, 1)
        store_columns(h, out_ptr, out_stride, row, end, strip * 32, layout)
    else:
        wide: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        store_columns(acc * (512.0 * gl.load(h_scale_ptr)), out_ptr, out_stride, row, end, strip * 64, wide)


@gluon.jit(do_not_specialize=["M", "N", "columns", "strips"])
def grouped_w4a8_kernel(
    x_ptr, x_stride, columns, codes_desc, scales_desc, strips, out_ptr, out_stride, rows_ptr, tiles_ptr, tile_count_ptr,
    x_scale_ptr, h_scale_ptr, bias_ptr, residual_ptr, residual_stride, M, N,
    STAGES: gl.constexpr, GATED: gl.constexpr, X_SCALE_STEP: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr, X_LAYOUT: gl.constexpr,
):  # fmt: skip
    """For every tile of a `RoutePlan`, with the weight of its expert, ``[strips * 64, columns]``,

        GATED:  out[r] = e4m3(swiglu(x[rows[r]] W^T * x_scale) / h_scale)
        else:   out[r] = x[r] W^T * h_scale

    and without tiles, for one dense weight, ``out[M, N] = (x W^T) * x_scale + bias + residual``.

    x: rows of whole groups of 128. codes_desc: boxes ``[1, 64, 128]`` of packed codes; scales_desc: boxes ``[128]``.
    x_scale: fp32, one for each row of x where X_SCALE_STEP is 1, one for all where it is 0.
    """
    WGS: gl.constexpr = 2
    x_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * 2, 128, 128], X_LAYOUT)
    codes, scales = weight_buffers(codes_desc, scales_desc, STAGES, WGS)
    full, empty = make_barriers(STAGES, 2, WGS)
    tiles_n = gl.cdiv(strips, WGS)
    tiles_k = gl.cdiv(columns, 256)
    launch_next()
    wait_for_last()
    tiles = gl.cdiv(M, 128) if tiles_ptr is None else gl.load(tile_count_ptr)
    shape = (tiles * tiles_n, tiles_n, tiles_k)
    ring = (x_bufs, codes, scales, full, empty)
    out = (out_ptr, out_stride)
    hooks = (x_scale_ptr, h_scale_ptr, bias_ptr, residual_ptr, residual_stride)
    x = (x_ptr, x_stride, (columns + 127) // 128 * 128)
    weight = (codes_desc, scales_desc, strips, gl.cdiv(columns, 128))
    limits = (M, N, strips)
    gl.warp_specialize(
        [
            (_consume, (0, out, hooks, rows_ptr, tiles_ptr, ring, shape, limits,
                        STAGES, WGS, GATED, X_SCALE_STEP)),
            (_consume, (1, out, hooks, rows_ptr, tiles_ptr, ring, shape, limits,
                        STAGES, WGS, GATED, X_SCALE_STEP)),
            (_produce, (x, weight, rows_ptr, tiles_ptr, ring, shape, M, STAGES, WGS)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
