"""Scales of blocks in the decode kernel: h is quantised by whoever makes the last of the columns that share a scale.

A warpgroup's tile holds 32 columns of h and 128 share a scale, so tiles go to memory in bf16 first; the fourth of a
block reads them back, out of L2, and stores e4m3 and the scale.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from katydid_kernels.gemm.experts_order import count

__all__ = ["finish_block"]


@gluon.jit
def finish_block(
    parts_ptr, ready_ptr, h, wide_ptr, scale_ptr, row, end, block, WIDTH: gl.constexpr, TOKENS: gl.constexpr
):
    """Count this warpgroup's part of ``h[row:end, 128 * block:][:, :128]``; the last to come quantises it and counts
    the block as ready. parts: an int32, zero between calls; h: e4m3 and its stride; wide: bf16 ``[rows, WIDTH]``."""
    h_ptr, h_stride = h
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    gl.thread_barrier()
    if gl.atomic_add(parts_ptr, 1, sem="acq_rel") == 3:
        gl.store(parts_ptr, 0)
        rows = row + gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
        cols = block * 128 + gl.arange(0, 128, gl.SliceLayout(0, layout))
        inside = (rows < end)[:, None] & (cols < WIDTH)[None, :]
        source = wide_ptr + rows.to(gl.int64)[:, None] * WIDTH + cols[None, :]
        value = gl.load(source, mask=inside, other=0.0, cache_modifier=".cg").to(gl.float32)
        scale = gl.maximum(gl.max(gl.abs(value), 1) / 448.0, 1e-12)
        gl.store(scale_ptr + rows * (WIDTH // 128) + block, scale, mask=rows < end)
        value = gl.minimum(gl.maximum(value / scale[:, None], -448.0), 448.0)
        gl.store(h_ptr + rows.to(gl.int64)[:, None] * h_stride + cols[None, :], value.to(gl.float8e4nv), mask=inside)
        count(ready_ptr)
