"""How a tile of the wide kernel leaves: split, scaled and finished piece by piece, staged for the copy engine."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

__all__ = ["copy_out", "halves", "quarters", "store_ragged"]


@gluon.jit
def halves(x, layout: gl.constexpr):
    """The left and right half of an accumulator: the split of its registers, nothing moves."""
    left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def quarters(left, right, layout: gl.constexpr):
    first, second = halves(left, layout)
    third, fourth = halves(right, layout)
    return first, second, third, fourth


@gluon.jit
def _finish(value, row, end, col, N, scalar, hooks, ROW_VECTOR: gl.constexpr, COL_VECTOR: gl.constexpr):
    """Scale, bias, residual, for what is not rounded yet."""
    row_scale_ptr, col_scale_ptr, bias_ptr, residual_ptr, residual_stride = hooks
    layout: gl.constexpr = value.type.layout
    rows = row + gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    if value.dtype == gl.float32:
        value *= scalar
    if ROW_VECTOR:
        value *= gl.load(row_scale_ptr + rows, mask=rows < end, other=0.0)[:, None]
    if COL_VECTOR:
        value *= gl.load(col_scale_ptr + cols, mask=cols < N, other=0.0)[None, :]
    if bias_ptr is not None:
        value += gl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(gl.float32)[None, :]
    if residual_ptr is not None:
        source = residual_ptr + rows.to(gl.int64)[:, None] * residual_stride + cols[None, :]
        value += gl.load(source, mask=(rows < end)[:, None] & (cols < N)[None, :], other=0.0).to(gl.float32)
    return value


@gluon.jit
def copy_out(
    pieces, place, N, scalar, hooks, out_desc, out_bufs, WHO: gl.constexpr,
    STAGED: gl.constexpr, ROW_VECTOR: gl.constexpr, COL_VECTOR: gl.constexpr,
):  # fmt: skip
    """The tile's pieces to D through staging buffers and TMA, which writes nothing past D's end."""
    row, end, col = place
    PIECE: gl.constexpr = out_bufs.type.shape[2]
    COUNT: gl.constexpr = len(pieces)
    if STAGED == COUNT:
        # The tile before had all the time of this product to leave; one barrier then serves all the pieces.
        tma.store_wait(0)
        gl.thread_barrier()
        for i in gl.static_range(COUNT):
            value = _finish(pieces[i], row, end, col + i * PIECE, N, scalar, hooks, ROW_VECTOR, COL_VECTOR)
            out_bufs.index(WHO * STAGED + i).store(value.to(out_desc.dtype))
        fence_async_shared()
        gl.thread_barrier()
        for i in gl.static_range(COUNT):
            tma.async_copy_shared_to_global(out_desc, [row, col + i * PIECE], out_bufs.index(WHO * STAGED + i))
    else:
        for i in gl.static_range(COUNT):
            out_buf = out_bufs.index(WHO * STAGED + i % STAGED)
            value = _finish(pieces[i], row, end, col + i * PIECE, N, scalar, hooks, ROW_VECTOR, COL_VECTOR)
            # The copy that last read this buffer was issued STAGED copies ago, or waited for since.
            tma.store_wait(STAGED - 1)
            gl.thread_barrier()
            out_buf.store(value.to(out_desc.dtype))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(out_desc, [row, col + i * PIECE], out_buf)


@gluon.jit
def store_ragged(
    pieces, place, N, scalar, hooks, out_ptr, out_stride, out_bufs, WHO: gl.constexpr,
    STAGED: gl.constexpr, ROW_VECTOR: gl.constexpr, COL_VECTOR: gl.constexpr,
):  # fmt: skip
    """The pieces up to row `end`: the rows after it are another group's, which the copy engine would overwrite."""
    row, end, col = place
    BLOCK_M: gl.constexpr = out_bufs.type.shape[1]
    PIECE: gl.constexpr = out_bufs.type.shape[2]
    LANES: gl.constexpr = PIECE // 8
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, lines))
    cols = col + gl.arange(0, PIECE, gl.SliceLayout(0, lines))
    addresses = out_ptr + rows.to(gl.int64)[:, None] * out_stride + cols[None, :]
    out_buf = out_bufs.index(WHO * STAGED)
    tma.store_wait(0)
    for i in gl.static_range(len(pieces)):
        value = _finish(pieces[i], row, end, col + i * PIECE, N, scalar, hooks, ROW_VECTOR, COL_VECTOR)
        gl.thread_barrier()
        out_buf.store(value.to(out_ptr.dtype.element_ty))
        gl.thread_barrier()
        gl.store(addresses + i * PIECE, out_buf.load(lines), mask=(rows < end)[:, None])
