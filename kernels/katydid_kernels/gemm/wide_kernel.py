"""The warp-specialised GEMM for many rows: D = A B^T, dense or grouped, as one persistent Gluon kernel.

One producer warp fills a ring of shared-memory stages by TMA; two or three consumer warpgroups multiply from it with
wgmma. Together they own a tile, `BLOCK_M` rows each, and share every stage of B. The wgmma of one stage stays in flight
while the next is issued, and a stage is handed back as soon as the one after it has started. A tile leaves piece by
piece through staging buffers that TMA empties in the background, while the producer already fetches the next tile.

fp8 products accumulate at less than fp32 precision inside the tensor cores. With PROMOTE each stage (128 of K) is
multiplied into a fresh accumulator, half a wide tile at a time to fit the registers, and added to the total in fp32;
the other warpgroups multiply meanwhile.

Gluon runs on the GPU alone; `plain.py` is the same product in plain Triton.
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

from katydid_kernels.gemm.ring import advance, banded_tile, before, launch_next, make_barriers, wait_for_last

__all__ = ["wide_gemm_kernel"]


@gluon.jit
def _produce(
    a_desc, b_desc, tiles_ptr, ring, problem, BAND: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr
):  # fmt: skip
    a_bufs, b_bufs, _, full, empty = ring
    _, _, tiles_m, tiles_n, tiles_k = problem
    BLOCK_M: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = b_desc.block_type.shape[1]
    STAGE_BYTES: gl.constexpr = WGS * a_desc.block_type.nbytes + b_desc.block_type.nbytes
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        if tiles_ptr is None:
            tile_m, tile_n = banded_tile(item, tiles_m, tiles_n, BAND)
            row = tile_m * (WGS * BLOCK_M)
            b_row = tile_n * BLOCK_N
        else:
            tile_n = item % tiles_n
            entry = tiles_ptr + item // tiles_n * 4
            row = gl.load(entry + 1)
            b_row = (gl.load(entry) * tiles_n + tile_n) * BLOCK_N
        for k in range(tiles_k):
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(ready, STAGE_BYTES)
            for part in gl.static_range(WGS):
                tma.async_copy_global_to_shared(
                    a_desc, [row + part * BLOCK_M, k * BLOCK_K], ready, a_bufs.index(stage * WGS + part)
                )
            tma.async_copy_global_to_shared(b_desc, [b_row, k * BLOCK_K], ready, b_bufs.index(stage))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _halves(x, layout: gl.constexpr):
    """The left and right half of an accumulator: the split of its registers, nothing moves."""
    left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _quarters(left, right, layout: gl.constexpr):
    first, second = _halves(left, layout)
    third, fourth = _halves(right, layout)
    return first, second, third, fourth


@gluon.jit
def _multiply(
    WHO: gl.constexpr, ring, stage, phase, tiles_k, STAGES: gl.constexpr, WGS: gl.constexpr, PROMOTE: gl.constexpr
):
    """One tile's product over all of K, as the left and right half of its columns."""
    a_bufs, b_bufs, _, full, empty = ring
    BLOCK_M: gl.constexpr = a_bufs.type.shape[1]
    BLOCK_N: gl.constexpr = b_bufs.type.shape[1]
    HALF: gl.constexpr = BLOCK_N // 2
    K_STEP: gl.constexpr = 256 // a_bufs.dtype.primitive_bitwidth
    tile_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, K_STEP])
    half_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, K_STEP])
    if PROMOTE and BLOCK_N == 256:
        left = gl.zeros([BLOCK_M, HALF], gl.float32, half_layout)
        right = gl.zeros([BLOCK_M, HALF], gl.float32, half_layout)
        for _ in range(tiles_k):
            mbarrier.wait(full.index(stage), phase)
            a = a_bufs.index(stage * WGS + WHO)
            b = b_bufs.index(stage)
            part = gl.zeros([BLOCK_M, HALF], gl.float32, half_layout)
            part = warpgroup_mma(a, b.slice(0, HALF).permute((1, 0)), part, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=(part,))
            left += part
            part = gl.zeros([BLOCK_M, HALF], gl.float32, half_layout)
            part = warpgroup_mma(a, b.slice(HALF, HALF).permute((1, 0)), part, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=(part,))
            mbarrier.arrive(empty.index(stage), count=1)
            right += part
            stage, phase = advance(stage, phase, STAGES)
    elif WGS == 3 and BLOCK_N == 256:
        # Three warpgroups start with 128 registers a thread, and ptxas refuses an instruction with as many results.
        left = gl.zeros([BLOCK_M, HALF], gl.float32, half_layout)
        right = gl.zeros([BLOCK_M, HALF], gl.float32, half_layout)
        for k in range(tiles_k):
            mbarrier.wait(full.index(stage), phase)
            a = a_bufs.index(stage * WGS + WHO)
            b = b_bufs.index(stage)
            left = warpgroup_mma(a, b.slice(0, HALF).permute((1, 0)), left, use_acc=k > 0, is_async=True)
            right = warpgroup_mma(a, b.slice(HALF, HALF).permute((1, 0)), right, use_acc=k > 0, is_async=True)
            left, right = warpgroup_mma_wait(2, deps=(left, right))
            mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=k > 0)
            stage, phase = advance(stage, phase, STAGES)
        left, right = warpgroup_mma_wait(0, deps=(left, right))
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
    else:
        acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, tile_layout)
        for k in range(tiles_k):
            mbarrier.wait(full.index(stage), phase)
            a = a_bufs.index(stage * WGS + WHO)
            b = b_bufs.index(stage).permute((1, 0))
            if PROMOTE:
                part = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, tile_layout)
                part = warpgroup_mma(a, b, part, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(empty.index(stage), count=1)
                acc += part
            else:
                acc = warpgroup_mma(a, b, acc, use_acc=k > 0, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=k > 0)
            stage, phase = advance(stage, phase, STAGES)
        if not PROMOTE:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
        left, right = _halves(acc, half_layout)
    return left, right, stage, phase


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
def _copy_out(
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
def _store_ragged(
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


@gluon.jit
def _consume(
    WHO: gl.constexpr, target, hooks, scalar, tiles_ptr, ring, problem, BAND: gl.constexpr, STAGES: gl.constexpr,
    WGS: gl.constexpr, STAGED: gl.constexpr, PROMOTE: gl.constexpr,
    ROW_VECTOR: gl.constexpr, COL_VECTOR: gl.constexpr,
):  # fmt: skip
    a_bufs, b_bufs, out_bufs, _, _ = ring
    out_desc, out_ptr, out_stride = target
    M, N, tiles_m, tiles_n, tiles_k = problem
    BLOCK_M: gl.constexpr = a_bufs.type.shape[1]
    BLOCK_N: gl.constexpr = b_bufs.type.shape[1]
    PIECE: gl.constexpr = out_bufs.type.shape[2]
    K_STEP: gl.constexpr = 256 // a_bufs.dtype.primitive_bitwidth
    piece_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, K_STEP])
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        left, right, stage, phase = _multiply(WHO, ring, stage, phase, tiles_k, STAGES, WGS, PROMOTE)
        if tiles_ptr is None:
            tile_m, tile_n = banded_tile(item, tiles_m, tiles_n, BAND)
            row = (tile_m * WGS + WHO) * BLOCK_M
            end = M
        else:
            tile_n = item % tiles_n
            entry = tiles_ptr + item // tiles_n * 4
            row = gl.load(entry + 1) + WHO * BLOCK_M
            end = gl.load(entry + 2)
            if hooks[1] is not None:
                scalar = gl.load(hooks[1] + gl.load(entry))
        if tiles_ptr is not None:
            # A group has no other hook: rounded at once, the tile takes half the registers on its way out.
            left = (left * scalar).to(out_desc.dtype)
            right = (right * scalar).to(out_desc.dtype)
        pieces = (left, right) if PIECE == BLOCK_N // 2 else _quarters(left, right, piece_layout)
        place = (row, end, tile_n * BLOCK_N)
        # Two branches, because the first is decided when the kernel is compiled and takes the third away.
        if out_ptr is None:  # noqa: SIM114
            _copy_out(pieces, place, N, scalar, hooks, out_desc, out_bufs, WHO, STAGED, ROW_VECTOR, COL_VECTOR)
        elif row + BLOCK_M <= end:
            _copy_out(pieces, place, N, scalar, hooks, out_desc, out_bufs, WHO, STAGED, ROW_VECTOR, COL_VECTOR)
        else:
            _store_ragged(
                pieces, place, N, scalar, hooks, out_ptr, out_stride, out_bufs, WHO, STAGED, ROW_VECTOR, COL_VECTOR
            )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K"])
def wide_gemm_kernel(
    a_desc, b_desc, out_desc, out_ptr, out_stride, tiles_ptr, tile_count_ptr,
    row_scale_ptr, col_scale_ptr, bias_ptr, residual_ptr, residual_stride, M, N, K,
    BAND: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr, STAGED: gl.constexpr, PROMOTE: gl.constexpr,
    ROW_VECTOR: gl.constexpr, COL_VECTOR: gl.constexpr,
):  # fmt: skip
    """D[M, N] = A[M, K] B[N, K]^T, or grouped: rows of tile t by the weight ``B[tiles[t, 0]]``.

    a_desc, b_desc: boxes ``[BLOCK_M, BLOCK_K]`` of A and ``[BLOCK_N, BLOCK_K]`` of B (its groups stacked, N a multiple
    of BLOCK_N); out_desc: boxes ``[BLOCK_M, PIECE]``, a half or a quarter of the tile, of which a warpgroup keeps
    STAGED in shared memory. Grouped, tiles_ptr holds the entries of `plan.RoutePlan.tiles` and out_ptr D itself, for
    the ragged last tile of a group. ROW_VECTOR, COL_VECTOR: those scales are vectors; otherwise they are one number, or
    None. Grouped, col_scale is one number a group, and the only scale.
    """
    BLOCK_M: gl.constexpr = a_desc.block_type.shape[0]
    BLOCK_N: gl.constexpr = b_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = b_desc.block_type.shape[1]
    PIECE: gl.constexpr = out_desc.block_type.shape[1]
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * WGS, BLOCK_M, BLOCK_K], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [WGS * STAGED, BLOCK_M, PIECE], out_desc.layout)
    full, empty = make_barriers(STAGES, 1, WGS)
    launch_next()
    wait_for_last()
    hooks = (row_scale_ptr, col_scale_ptr, bias_ptr, residual_ptr, residual_stride)
    scalar = 1.0
    if row_scale_ptr is not None and not ROW_VECTOR:
        scalar *= gl.load(row_scale_ptr)
    if tiles_ptr is None and col_scale_ptr is not None and not COL_VECTOR:
        scalar *= gl.load(col_scale_ptr)
    if tiles_ptr is None:
        tiles_m = gl.cdiv(M, BLOCK_M * WGS)
    else:
        tiles_m = gl.load(tile_count_ptr)
    tiles_n = gl.cdiv(N, BLOCK_N)
    tiles_k = gl.cdiv(K, BLOCK_K)
    target = (out_desc, out_ptr, out_stride)
    ring = (a_bufs, b_bufs, out_bufs, full, empty)
    problem = (M, N, tiles_m, tiles_n, tiles_k)
    # A warpgroup's registers come out of one pool: what the producer gives up, the consumers' accumulators take.
    if WGS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, target, hooks, scalar, tiles_ptr, ring, problem,
                            BAND, STAGES, WGS, STAGED, PROMOTE, ROW_VECTOR, COL_VECTOR)),
                (_consume, (1, target, hooks, scalar, tiles_ptr, ring, problem,
                            BAND, STAGES, WGS, STAGED, PROMOTE, ROW_VECTOR, COL_VECTOR)),
                (_produce, (a_desc, b_desc, tiles_ptr, ring, problem, BAND, STAGES, WGS)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, target, hooks, scalar, tiles_ptr, ring, problem,
                            BAND, STAGES, WGS, STAGED, PROMOTE, ROW_VECTOR, COL_VECTOR)),
                (_consume, (1, target, hooks, scalar, tiles_ptr, ring, problem,
                            BAND, STAGES, WGS, STAGED, PROMOTE, ROW_VECTOR, COL_VECTOR)),
                (_consume, (2, target, hooks, scalar, tiles_ptr, ring, problem,
                            BAND, STAGES, WGS, STAGED, PROMOTE, ROW_VECTOR, COL_VECTOR)),
                (_produce, (a_desc, b_desc, tiles_ptr, ring, problem, BAND, STAGES, WGS)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
