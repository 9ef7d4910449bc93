"""The warp-specialised GEMM for many rows: D = A B^T, dense or grouped, as one persistent Gluon kernel.

One producer warp fills a ring of shared-memory stages by TMA; two or three consumer warpgroups multiply from it with
wgmma. Together they own a tile, `BLOCK_M` rows each, and share every stage of B. The wgmma of one stage stays in flight
while the next is issued, and a stage is handed back as soon as the one after it has started. A tile leaves piece by
piece through staging buffers that TMA empties in the background, while the producer already fetches the next tile.

fp8 products accumulate at less than fp32 precision inside the tensor cores. With PROMOTE each stage (128 of K) is
multiplied into a fresh accumulator, half a wide tile at a time to fit the registers, and added to the total in fp32;
the other warpgroups multiply meanwhile. Scales of blocks (a row by 128 of K in A, 128 x 128 in B) enter there.

Gluon runs on the GPU alone; `plain.py` is the same product in plain Triton.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from katydid_kernels.gemm.ring import advance, banded_tile, before, launch_next, make_barriers, wait_for_last
from katydid_kernels.gemm.wide_epilogue import copy_out, halves, quarters, store_ragged

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
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, STAGE_BYTES)
            for part in gl.static_range(WGS):
                tma.async_copy_global_to_shared(
                    a_desc, [row + part * BLOCK_M, k * BLOCK_K], bar, a_bufs.index(stage * WGS + part)
                )
            tma.async_copy_global_to_shared(b_desc, [b_row, k * BLOCK_K], bar, b_bufs.index(stage))
            stage, phase = advance(stage, phase, STAGES)


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
        left, right = halves(acc, half_layout)
    return left, right, stage, phase


@gluon.jit
def _multiply_blocks(
    WHO: gl.constexpr, ring, stage, phase, tiles_k, row_scales, valid, col_scales, STAGES: gl.constexpr,
    WGS: gl.constexpr,
):  # fmt: skip
    """The same with scales of blocks, for tiles of 128 columns: each stage's product is scaled as it is added.

    row_scales, valid: addresses of the first scale of each row of A, and which rows there are; col_scales: address of
    the first scale of the tile's rows of B.
    """
    a_bufs, b_bufs, _, full, empty = ring
    BLOCK_M: gl.constexpr = a_bufs.type.shape[1]
    K_STEP: gl.constexpr = 256 // a_bufs.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, K_STEP])
    acc = gl.zeros([BLOCK_M, 128], gl.float32, layout)
    for k in range(tiles_k):
        scale = gl.load(row_scales + k, mask=valid, other=0.0) * gl.load(col_scales + k)
        mbarrier.wait(full.index(stage), phase)
        a = a_bufs.index(stage * WGS + WHO)
        part = gl.zeros([BLOCK_M, 128], gl.float32, layout)
        part = warpgroup_mma(a, b_bufs.index(stage).permute((1, 0)), part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(stage), count=1)
        acc += part * scale[:, None]
        stage, phase = advance(stage, phase, STAGES)
    left, right = halves(acc, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, K_STEP]))
    return left, right, stage, phase


@gluon.jit
def _consume(
    WHO: gl.constexpr, target, hooks, scalar, tiles_ptr, ring, problem, BAND: gl.constexpr, STAGES: gl.constexpr,
    WGS: gl.constexpr, STAGED: gl.constexpr, PROMOTE: gl.constexpr,
    ROW_VECTOR: gl.constexpr, COL_VECTOR: gl.constexpr, BLOCKS: gl.constexpr,
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
        if not BLOCKS:
            left, right, stage, phase = _multiply(WHO, ring, stage, phase, tiles_k, STAGES, WGS, PROMOTE)
        if tiles_ptr is None:
            tile_m, tile_n = banded_tile(item, tiles_m, tiles_n, BAND)
            row = (tile_m * WGS + WHO) * BLOCK_M
            end = M
            b_row = tile_n * BLOCK_N
        else:
            tile_n = item % tiles_n
            entry = tiles_ptr + item // tiles_n * 4
            row = gl.load(entry + 1) + WHO * BLOCK_M
            end = gl.load(entry + 2)
            group = gl.load(entry)
            b_row = (group * tiles_n + tile_n) * BLOCK_N
            if hooks[1] is not None and not BLOCKS:
                scalar = gl.load(hooks[1] + group)
        if BLOCKS:
            layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, K_STEP])
            rows = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
            left, right, stage, phase = _multiply_blocks(
                WHO, ring, stage, phase, tiles_k, hooks[0] + rows * tiles_k, rows < end,
                hooks[1] + b_row // 128 * tiles_k, STAGES, WGS,
            )  # fmt: skip
        if tiles_ptr is not None:
            # A group has no other hook: rounded at once, the tile takes half the registers on its way out.
            left = (left * scalar).to(out_desc.dtype)
            right = (right * scalar).to(out_desc.dtype)
        pieces = (left, right) if PIECE == BLOCK_N // 2 else quarters(left, right, piece_layout)
        place = (row, end, tile_n * BLOCK_N)
        # Two branches, because the first is decided when the kernel is compiled and takes the third away.
        if out_ptr is None:  # noqa: SIM114
            copy_out(pieces, place, N, scalar, hooks, out_desc, out_bufs, WHO, STAGED, ROW_VECTOR, COL_VECTOR)
        elif row + BLOCK_M <= end:
            copy_out(pieces, place, N, scalar, hooks, out_desc, out_bufs, WHO, STAGED, ROW_VECTOR, COL_VECTOR)
        else:
            store_ragged(
                pieces, place, N, scalar, hooks, out_ptr, out_stride, out_bufs, WHO, STAGED, ROW_VECTOR, COL_VECTOR
            )
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K"])
def wide_gemm_kernel(
    a_desc, b_desc, out_desc, out_ptr, out_stride, tiles_ptr, tile_count_ptr,
    row_scale_ptr, col_scale_ptr, bias_ptr, residual_ptr, residual_stride, M, N, K,
    BAND: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr, STAGED: gl.constexpr, PROMOTE: gl.constexpr,
    ROW_VECTOR: gl.constexpr, COL_VECTOR: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """D[M, N] = A[M, K] B[N, K]^T, or grouped: rows of tile t by the weight ``B[tiles[t, 0]]``.

    a_desc, b_desc: boxes ``[BLOCK_M, BLOCK_K]`` of A and ``[BLOCK_N, BLOCK_K]`` of B (its groups stacked, N a multiple
    of BLOCK_N); out_desc: boxes ``[BLOCK_M, PIECE]``, a half or a quarter of the tile, of which a warpgroup keeps
    STAGED in shared memory. Grouped, tiles_ptr holds the entries of `plan.RoutePlan.tiles` and out_ptr D itself, for
    the ragged last tile of a group. ROW_VECTOR, COL_VECTOR: those scales are vectors; otherwise they are one number, or
    None. Grouped, col_scale is one number a group, and the only scale. BLOCKS: they are of blocks, row_scale fp32
    ``[M, K / 128]`` and col_scale ``[ceil(N / 128), K / 128]`` (its groups stacked); BLOCK_N is 128.
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
    if row_scale_ptr is not None and not ROW_VECTOR and not BLOCKS:
        scalar *= gl.load(row_scale_ptr)
    if tiles_ptr is None and col_scale_ptr is not None and not COL_VECTOR and not BLOCKS:
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
                            BAND, STAGES, WGS, STAGED, PROMOTE, ROW_VECTOR, COL_VECTOR, BLOCKS)),
                (_consume, (1, target, hooks, scalar, tiles_ptr, ring, problem,
                            BAND, STAGES, WGS, STAGED, PROMOTE, ROW_VECTOR, COL_VECTOR, BLOCKS)),
                (_produce, (a_desc, b_desc, tiles_ptr, ring, problem, BAND, STAGES, WGS)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, target, hooks, scalar, tiles_ptr, ring, problem,
                            BAND, STAGES, WGS, STAGED, PROMOTE, ROW_VECTOR, COL_VECTOR, BLOCKS)),
                (_consume, (1, target, hooks, scalar, tiles_ptr, ring, problem,
                            BAND, STAGES, WGS, STAGED, PROMOTE, ROW_VECTOR, COL_VECTOR, BLOCKS)),
                (_consume, (2, target, hooks, scalar, tiles_ptr, ring, problem,
                            BAND, STAGES, WGS, STAGED, PROMOTE, ROW_VECTOR, COL_VECTOR, BLOCKS)),
                (_produce, (a_desc, b_desc, tiles_ptr, ring, problem, BAND, STAGES, WGS)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
