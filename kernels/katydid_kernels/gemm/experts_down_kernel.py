"""Down projection of routed experts for many tokens with the weighted sum beside it, as one persistent kernel.

The rows of y, one for each (token, choice), are many times the output; written and read back they would cost more than
both products. So the columns are taken block by block: while the tensor cores make one block of y, a warpgroup of its
own on every SM sums the block before, whose rows are still in L2. A block is as wide as L2 allows, and y is a ring of
`RING` blocks whose lines are written over before they ever leave for memory.

One producer warp streams h and w2 by TMA, the consumer warpgroups own 64 rows of a tile each, and the summing
warpgroup waits on a counter a block that every part of a tile counts up once its copies have landed.
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

from katydid_kernels.gemm.experts_order import count, wait_for_count
from katydid_kernels.gemm.experts_sum import piece_layout, routes_of, sum_choices
from katydid_kernels.gemm.ring import advance, before, launch_next, make_barriers, wait_for_last
from katydid_kernels.gemm.wide_epilogue import halves

__all__ = ["experts_down_kernel"]


@gluon.jit
def _landed():
    """Wait until the copies to global memory that this warpgroup issued are done, not only read."""
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_at_leisure(counter_ptr, target):
    """`wait_for_count` for a wait that may be long: asks seldom and cheaply."""
    seen = _seen(counter_ptr)
    while seen < target:
        gl.inline_asm_elementwise("nanosleep.u32 64; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        seen = _seen(counter_ptr)
    wait_for_count(counter_ptr, target)


@gluon.jit
def _seen(counter_ptr):
    """The counter as it is; acquiring it would empty the SM's L1 each time."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.s32 $0, [$1];", "=r,l", [counter_ptr], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _place(item, tiles, TILES_N: gl.constexpr):
    """Column block, plan tile and column tile of a work item."""
    block = item // (tiles * TILES_N)
    rest = item % (tiles * TILES_N)
    return block, rest // TILES_N, block * TILES_N + rest % TILES_N


@gluon.jit
def _numbers(item, items, tiles_ptr, tiles, TILES_N: gl.constexpr):
    """Expert, first row and end of an item's tile; past the last item some other tile's."""
    _, tile, _ = _place(gl.minimum(item, gl.maximum(items - 1, 0)), gl.maximum(tiles, 1), TILES_N)
    entry = tiles_ptr + tile * 4
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)


@gluon.jit
def _produce(
    h_desc, w2_desc, tiles_ptr, ring, tiles, H: gl.constexpr, WIDTH: gl.constexpr, TILES_N: gl.constexpr,
    STAGES: gl.constexpr, WGS: gl.constexpr,
):  # fmt: skip
    h_bufs, w_bufs, full, empty = ring
    BLOCK_N: gl.constexpr = w2_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w2_desc.block_type.shape[1]
    STAGE_BYTES: gl.constexpr = WGS * h_desc.block_type.nbytes + w2_desc.block_type.nbytes
    STEPS: gl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), tiles * (H // BLOCK_N), gl.num_programs(0)):
        _, tile, tile_n = _place(item, tiles, TILES_N)
        entry = tiles_ptr + tile * 4
        row = gl.load(entry + 1)
        w_row = gl.load(entry) * H + tile_n * BLOCK_N
        for k in range(STEPS):
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(bar, STAGE_BYTES)
            tma.async_copy_global_to_shared(w2_desc, [w_row, k * BLOCK_K], bar, w_bufs.index(stage))
            for part in gl.static_range(WGS):
                tma.async_copy_global_to_shared(
                    h_desc, [row + part * 64, k * BLOCK_K], bar, h_bufs.index(stage * WGS + part)
                )
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _multiply(
    WHO: gl.constexpr, ring, stage, phase, WIDTH: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr
):  # fmt: skip
    """One tile's product over all of K, of whose last stage only what exists is multiplied."""
    h_bufs, w_bufs, full, empty = ring
    BLOCK_N: gl.constexpr = w_bufs.type.shape[1]
    BLOCK_K: gl.constexpr = w_bufs.type.shape[2]
    WHOLE: gl.constexpr = WIDTH // BLOCK_K
    REST: gl.constexpr = WIDTH % BLOCK_K
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_N, 256 // h_bufs.dtype.primitive_bitwidth]
    )
    acc = gl.zeros([64, BLOCK_N], gl.float32, layout)
    for k in range(WHOLE):
        mbarrier.wait(full.index(stage), phase)
        h = h_bufs.index(stage * WGS + WHO)
        acc = warpgroup_mma(h, w_bufs.index(stage).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=k > 0)
        stage, phase = advance(stage, phase, STAGES)
    if REST > 0:
        mbarrier.wait(full.index(stage), phase)
        h = h_bufs.index(stage * WGS + WHO).slice(0, REST, 1)
        w = w_bufs.index(stage).slice(0, REST, 1).permute((1, 0))
        acc = warpgroup_mma(h, w, acc, use_acc=WHOLE > 0, is_async=True)
        if WHOLE > 0:
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
        stage, phase = advance(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
    return acc, stage, phase


@gluon.jit
def _consume(
    WHO: gl.constexpr, y, counters, tiles_ptr, scale_ptr, ring, out_bufs, tiles, H: gl.constexpr, WIDTH: gl.constexpr,
    TILES_N: gl.constexpr, RING: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr,
):  # fmt: skip
    y_desc, y_ptr, pairs = y
    made_ptr, summed_ptr = counters
    BLOCK_N: gl.constexpr = ring[1].type.shape[1]
    PIECE: gl.constexpr = BLOCK_N // 2
    COLS: gl.constexpr = TILES_N * BLOCK_N
    BLOCKS: gl.constexpr = H // COLS
    half_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, PIECE, 256 // ring[0].dtype.primitive_bitwidth]
    )
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PIECE, PIECE // 8], [4, 1], [1, 0])
    line = gl.arange(0, 64, gl.SliceLayout(1, lines))
    col = gl.arange(0, PIECE, gl.SliceLayout(0, lines))
    left_buf = out_bufs.index(2 * WHO)
    right_buf = out_bufs.index(2 * WHO + 1)
    stage = 0
    phase = 0
    items = tiles * (H // BLOCK_N)
    expert, row, end = _numbers(gl.program_id(0), items, tiles_ptr, tiles, TILES_N)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        block, _, tile_n = _place(item, tiles, TILES_N)
        scale = gl.load(scale_ptr + expert)
        acc, stage, phase = _multiply(WHO, ring, stage, phase, WIDTH, STAGES, WGS)
        left, right = halves((acc * scale).to(gl.bfloat16), half_layout)
        # The tile before had the time of this product to leave. Counted late, it costs nobody a wait; the first one
        # counts for a block that does not exist.
        _landed()
        earlier = item - gl.num_programs(0)
        count(made_ptr + gl.where(earlier >= 0, earlier // (tiles * TILES_N), BLOCKS))
        if RING < BLOCKS and block >= RING:
            _wait_at_leisure(summed_ptr + block - RING, gl.num_programs(0))
        row += WHO * 64
        place = block % RING * pairs + row
        first = tile_n % TILES_N * BLOCK_N
        left_buf.store(left)
        right_buf.store(right)
        if row + 64 <= end:
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(y_desc, [place, first], left_buf)
            tma.async_copy_shared_to_global(y_desc, [place, first + PIECE], right_buf)
        else:
            # Rows past the end are another expert's, which the copy engine would overwrite.
            gl.thread_barrier()
            there = (row + line < end)[:, None]
            target = y_ptr + (place + line).to(gl.int64)[:, None] * COLS + (first + col)[None, :]
            gl.store(target, left_buf.load(lines), mask=there)
            gl.store(target + PIECE, right_buf.load(lines), mask=there)
        # Asked for here, they are there when the next tile begins.
        expert, row, end = _numbers(item + gl.num_programs(0), items, tiles_ptr, tiles, TILES_N)
    _landed()
    rounds = (items - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    if rounds > 0:
        count(made_ptr + (gl.program_id(0) + (rounds - 1) * gl.num_programs(0)) // (tiles * TILES_N))


@gluon.jit
def _sum(
    y, result, counters, sync_ptr, tiles, H: gl.constexpr, TOP_K: gl.constexpr, PADDED: gl.constexpr,
    BLOCK_N: gl.constexpr, TILES_N: gl.constexpr, RING: gl.constexpr, WGS: gl.constexpr,
):  # fmt: skip
    """The weighted sum of every block's rows, as soon as all of them have been made."""
    _, y_ptr, pairs = y
    slots_ptr, weights_ptr, shared_ptr, out_ptr, tokens = result
    made_ptr, summed_ptr = counters
    COLS: gl.constexpr = TILES_N * BLOCK_N
    BLOCKS: gl.constexpr = H // COLS
    PIECE: gl.constexpr = 256 if COLS % 256 == 0 else 128
    PIECES: gl.constexpr = COLS // PIECE
    TOKENS: gl.constexpr = 8 * (256 // PIECE)
    layout: gl.constexpr = piece_layout(PIECE)
    groups = gl.cdiv(tokens, TOKENS)
    line = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    column = gl.arange(0, PIECE, gl.SliceLayout(0, layout))
    for block in range(BLOCKS):
        slots, weights = routes_of(
            gl.program_id(0) // PIECES, slots_ptr, weights_ptr, tokens, PIECE, TOKENS, TOP_K, PADDED
        )
        _wait_at_leisure(made_ptr + block, tiles * (TILES_N * WGS))
        rows_ptr = y_ptr + (block % RING * pairs).to(gl.int64) * COLS
        for item in range(gl.program_id(0), groups * PIECES, gl.num_programs(0)):
            col = item % PIECES * PIECE + column
            token = item // PIECES * TOKENS + line
            total = sum_choices(rows_ptr, COLS, col, slots, weights, PIECE, TOP_K)
            slots, weights = routes_of(
                (item + gl.num_programs(0)) // PIECES, slots_ptr, weights_ptr, tokens, PIECE, TOKENS, TOP_K, PADDED
            )
            target = token.to(gl.int64)[:, None] * H + (block * COLS + col)[None, :]
            there = (token < tokens)[:, None] & (col < COLS)[None, :]
            if shared_ptr is not None:
                total += gl.load(shared_ptr + target, mask=there, other=0.0).to(gl.float32)
            gl.store(out_ptr + target, total.to(out_ptr.dtype.element_ty), mask=there)
        if RING < BLOCKS:
            count(summed_ptr + block)
    gl.thread_barrier()
    if gl.atomic_add(sync_ptr, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        for i in range(BLOCKS):
            gl.store(made_ptr + i, 0)
            gl.store(summed_ptr + i, 0)
        gl.store(made_ptr + BLOCKS, 0)
        gl.store(sync_ptr, 0)


@gluon.jit(do_not_specialize=["pairs", "tokens"])
def experts_down_kernel(
    h_desc, w2_desc, y_desc, y_ptr, tiles_ptr, tile_count_ptr, scale_ptr, slots_ptr, weights_ptr, shared_ptr, out_ptr,
    counters_ptr, pairs, tokens, H: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, PADDED: gl.constexpr,
    TILES_N: gl.constexpr, RING: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, SUM_REGISTERS: gl.constexpr,
):  # fmt: skip
    """``out[t] = sum over j of weights[t, j] * w2[e] h[slots[t, j]] * scale[e] + shared[t]``, e the expert of the row.

    h_desc: boxes ``[64, BLOCK_K]`` of h; w2_desc: boxes ``[BLOCK_N, BLOCK_K]`` of w2, its experts stacked; y: scratch
    ``[RING, pairs, COLS]`` of bf16, COLS = TILES_N * BLOCK_N columns a block, and its boxes ``[64, BLOCK_N / 2]``.
    Slots and tiles are a `RoutePlan`'s, its tiles of WGS * 64 rows. scale: fp32 ``[E]``. counters: zeros, an int32
    for each of two a block, and two more. PADDED: TOP_K rounded up to a power of two.
    """
    BLOCK_N: gl.constexpr = w2_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w2_desc.block_type.shape[1]
    BLOCKS: gl.constexpr = H // (TILES_N * BLOCK_N)
    h_bufs = gl.allocate_shared_memory(h_desc.dtype, [STAGES * WGS, 64, BLOCK_K], h_desc.layout)
    w_bufs = gl.allocate_shared_memory(w2_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w2_desc.layout)
    out_bufs = gl.allocate_shared_memory(y_desc.dtype, [2 * WGS, 64, BLOCK_N // 2], y_desc.layout)
    full, empty = make_barriers(STAGES, 1, WGS)
    launch_next()
    wait_for_last()
    tiles = gl.load(tile_count_ptr)
    ring = (h_bufs, w_bufs, full, empty)
    y = (y_desc, y_ptr, pairs)
    result = (slots_ptr, weights_ptr, shared_ptr, out_ptr, tokens)
    counters = (counters_ptr, counters_ptr + BLOCKS + 1)
    sync_ptr = counters_ptr + 2 * BLOCKS + 1
    if WGS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, y, counters, tiles_ptr, scale_ptr, ring, out_bufs, tiles,
                            H, WIDTH, TILES_N, RING, STAGES, WGS)),
                (_consume, (1, y, counters, tiles_ptr, scale_ptr, ring, out_bufs, tiles,
                            H, WIDTH, TILES_N, RING, STAGES, WGS)),
                (_sum, (y, result, counters, sync_ptr, tiles, H, TOP_K, PADDED, BLOCK_N, TILES_N, RING, WGS)),
                (_produce, (h_desc, w2_desc, tiles_ptr, ring, tiles, H, WIDTH, TILES_N, STAGES, WGS)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, SUM_REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, y, counters, tiles_ptr, scale_ptr, ring, out_bufs, tiles,
                            H, WIDTH, TILES_N, RING, STAGES, WGS)),
                (_consume, (1, y, counters, tiles_ptr, scale_ptr, ring, out_bufs, tiles,
                            H, WIDTH, TILES_N, RING, STAGES, WGS)),
                (_consume, (2, y, counters, tiles_ptr, scale_ptr, ring, out_bufs, tiles,
                            H, WIDTH, TILES_N, RING, STAGES, WGS)),
                (_sum, (y, result, counters, sync_ptr, tiles, H, TOP_K, PADDED, BLOCK_N, TILES_N, RING, WGS)),
                (_produce, (h_desc, w2_desc, tiles_ptr, ring, tiles, H, WIDTH, TILES_N, STAGES, WGS)),
            ],
            [4, 4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, SUM_REGISTERS, 24],
        )  # fmt: skip
