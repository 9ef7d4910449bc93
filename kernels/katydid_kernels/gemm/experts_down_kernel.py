"""Down projection of routed experts for many tokens with the weighted sum beside it, as one persistent kernel.

The rows of y, one for each (token, choice), are many times the output; written and read back they would cost more than
both products. So the columns are taken block by block: while the tensor cores make one block of y, a warpgroup of its
own on every SM sums the block before: out of L2 where the batch allows, else from memory that is read while it is
written, which is faster than one after the other.

One producer warp streams h and w2 by TMA, the consumer warpgroups own 64 rows of a tile each, and the summing
warpgroup waits on a counter a block of the parts of tiles whose copies have landed. It is counted once a block: to
publish what was written takes as long as a tile.
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

from katydid_kernels.gemm.experts_order import wait_for_count
from katydid_kernels.gemm.experts_sum import piece_layout, routes_of, sum_choices
from katydid_kernels.gemm.ring import advance, before, fence_async_global, launch_next, make_barriers, wait_for_last
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
def _numbers(item, items, tiles_ptr, tiles):
    """Expert, first row and end of an item's tile; past the last item some other tile's."""
    entry = tiles_ptr + gl.minimum(item, gl.maximum(items - 1, 0)) % gl.maximum(tiles, 1) * 4
    return gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)


@gluon.jit
def _produce(
    h_desc, w2_desc, tiles_ptr, h_ring, w_ring, tiles, H: gl.constexpr, STEPS: gl.constexpr, TILES_N: gl.constexpr,
    SETS: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr,
):  # fmt: skip
    h_bufs, h_full, h_empty = h_ring
    w_bufs, w_full, w_empty = w_ring
    BLOCK_N: gl.constexpr = w2_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w2_desc.block_type.shape[1]
    held = 0
    held_phase = 1
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), tiles * (H // (TILES_N * BLOCK_N)), gl.num_programs(0)):
        entry = tiles_ptr + item % tiles * 4
        row = gl.load(entry + 1)
        w_row = gl.load(entry) * H + item // tiles * (TILES_N * BLOCK_N)
        bar = h_full.index(held)
        mbarrier.wait(h_empty.index(held), held_phase)
        mbarrier.expect(bar, STEPS * WGS * h_desc.block_type.nbytes)
        for k in gl.static_range(STEPS):
            for part in gl.static_range(WGS):
                place = (held * STEPS + k) * WGS + part
                tma.async_copy_global_to_shared(h_desc, [row + part * 64, k * BLOCK_K], bar, h_bufs.index(place))
        held, held_phase = advance(held, held_phase, SETS)
        for n in range(TILES_N):
            for k in gl.static_range(STEPS):
                bar = w_full.index(stage)
                mbarrier.wait(w_empty.index(stage), phase)
                mbarrier.expect(bar, w2_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(w2_desc, [w_row + n * BLOCK_N, k * BLOCK_K], bar, w_bufs.index(stage))
                stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _multiply(
    WHO: gl.constexpr, h_bufs, held, w_ring, stage, phase, WIDTH: gl.constexpr, STEPS: gl.constexpr,
    STAGES: gl.constexpr, WGS: gl.constexpr,
):  # fmt: skip
    """A warpgroup's rows of h by 128 rows of w2; of the last stage only what exists is multiplied."""
    w_bufs, full, empty = w_ring
    BLOCK_N: gl.constexpr = w_bufs.type.shape[1]
    BLOCK_K: gl.constexpr = w_bufs.type.shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, BLOCK_N, 256 // h_bufs.dtype.primitive_bitwidth]
    )
    acc = gl.zeros([64, BLOCK_N], gl.float32, layout)
    for k in gl.static_range(STEPS):
        mbarrier.wait(full.index(stage), phase)
        h = h_bufs.index((held * STEPS + k) * WGS + WHO)
        w = w_bufs.index(stage)
        if (k + 1) * BLOCK_K > WIDTH:
            h = h.slice(0, WIDTH % BLOCK_K, 1)
            w = w.slice(0, WIDTH % BLOCK_K, 1)
        acc = warpgroup_mma(h, w.permute((1, 0)), acc, use_acc=k > 0, is_async=True)
        if k > 0:
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
        stage, phase = advance(stage, phase, STAGES)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
    return acc, stage, phase


@gluon.jit
def _count_tiles(made_ptr, item, of_block):
    """Publish this warpgroup's part of the tiles that this CTA has made of a block, of which `item` is the last."""
    _landed()
    fence_async_global()
    gl.thread_barrier()
    block = item // of_block
    before = gl.maximum(block * of_block - gl.program_id(0) + gl.num_programs(0) - 1, 0) // gl.num_programs(0)
    gl.atomic_add(made_ptr + block, item // gl.num_programs(0) - before + 1, sem="release")


@gluon.jit
def _consume(
    WHO: gl.constexpr, y, made_ptr, tiles_ptr, scale_ptr, h_ring, w_ring, out_bufs, tiles, H: gl.constexpr,
    WIDTH: gl.constexpr, STEPS: gl.constexpr, TILES_N: gl.constexpr, SETS: gl.constexpr, STAGES: gl.constexpr,
    WGS: gl.constexpr, SUM: gl.constexpr,
):  # fmt: skip
    y_desc, y_ptr, pairs = y
    h_bufs, h_full, h_empty = h_ring
    BLOCK_N: gl.constexpr = w_ring[0].type.shape[1]
    PIECE: gl.constexpr = BLOCK_N // 2
    COLS: gl.constexpr = TILES_N * BLOCK_N
    half_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, 1], [16, PIECE, 256 // h_bufs.dtype.primitive_bitwidth]
    )
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PIECE, PIECE // 8], [4, 1], [1, 0])
    line = gl.arange(0, 64, gl.SliceLayout(1, lines))
    col = gl.arange(0, PIECE, gl.SliceLayout(0, lines))
    left_buf = out_bufs.index(2 * WHO)
    right_buf = out_bufs.index(2 * WHO + 1)
    held = 0
    held_phase = 0
    stage = 0
    phase = 0
    items = tiles * (H // COLS)
    expert, row, end = _numbers(gl.program_id(0), items, tiles_ptr, tiles)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        block = item // tiles
        scale = gl.load(scale_ptr + expert)
        row += WHO * 64
        place = block * pairs + row
        mbarrier.wait(h_full.index(held), held_phase)
        for n in range(TILES_N):
            acc, stage, phase = _multiply(WHO, h_bufs, held, w_ring, stage, phase, WIDTH, STEPS, STAGES, WGS)
            if n == TILES_N - 1:
                mbarrier.arrive(h_empty.index(held), count=1)
            left, right = halves((acc * scale).to(gl.bfloat16), half_layout)
            earlier = item - gl.num_programs(0)
            if SUM and (n == 0) & (earlier >= 0) & (earlier // tiles != block):
                # The last tile of a block had the time of this product to leave: counted late, nobody waits for it.
                _count_tiles(made_ptr, earlier, tiles)
            tma.store_wait(0)
            gl.thread_barrier()
            left_buf.store(left)
            right_buf.store(right)
            first = n * BLOCK_N
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
        held, held_phase = advance(held, held_phase, SETS)
        # Asked for here, they are there when the next tile begins.
        expert, row, end = _numbers(item + gl.num_programs(0), items, tiles_ptr, tiles)
    rounds = (items - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    if SUM and rounds > 0:
        _count_tiles(made_ptr, gl.program_id(0) + (rounds - 1) * gl.num_programs(0), tiles)


@gluon.jit
def _sum(
    y, result, made_ptr, tiles, H: gl.constexpr, TOP_K: gl.constexpr, PADDED: gl.constexpr,
    BLOCK_N: gl.constexpr, TILES_N: gl.constexpr, WGS: gl.constexpr, SUM: gl.constexpr,
):  # fmt: skip
    """The weighted sum of every block's rows, as soon as all of them have been made."""
    _, y_ptr, pairs = y
    slots_ptr, weights_ptr, shared_ptr, out_ptr, tokens = result
    COLS: gl.constexpr = TILES_N * BLOCK_N
    BLOCKS: gl.constexpr = H // COLS
    PIECE: gl.constexpr = 256 if COLS % 256 == 0 else 128
    PIECES: gl.constexpr = COLS // PIECE
    TOKENS: gl.constexpr = 8 * (256 // PIECE)
    layout: gl.constexpr = piece_layout(PIECE)
    groups = gl.cdiv(tokens, TOKENS)
    line = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    column = gl.arange(0, PIECE, gl.SliceLayout(0, layout))
    for block in range(BLOCKS if SUM else 0):
        slots, weights = routes_of(
            gl.program_id(0) // PIECES, slots_ptr, weights_ptr, tokens, PIECE, TOKENS, TOP_K, PADDED
        )
        _wait_at_leisure(made_ptr + block, tiles * WGS)
        rows_ptr = y_ptr + block.to(gl.int64) * pairs * COLS
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
    gl.thread_barrier()
    if SUM and gl.atomic_add(made_ptr + BLOCKS, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        for i in range(BLOCKS + 1):
            gl.store(made_ptr + i, 0)


@gluon.jit(do_not_specialize=["pairs", "tokens"])
def experts_down_kernel(
    h_desc, w2_desc, y_desc, y_ptr, tiles_ptr, tile_count_ptr, scale_ptr, slots_ptr, weights_ptr, shared_ptr, out_ptr,
    made_ptr, pairs, tokens, H: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, PADDED: gl.constexpr,
    TILES_N: gl.constexpr, SETS: gl.constexpr, STAGES: gl.constexpr, WGS: gl.constexpr, SUM: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, SUM_REGISTERS: gl.constexpr,
):  # fmt: skip
    """``out[t] = sum over j of weights[t, j] * w2[e] h[slots[t, j]] * scale[e] + shared[t]``, e the expert of the row.

    h_desc: boxes ``[64, BLOCK_K]`` of h; w2_desc: boxes ``[BLOCK_N, BLOCK_K]`` of w2, its experts stacked; y: bf16
    scratch ``[H / COLS, pairs, COLS]``, COLS = TILES_N * BLOCK_N columns a block, and its boxes ``[64, BLOCK_N / 2]``.
    Slots and tiles are a `RoutePlan`'s, its tiles of WGS * 64 rows. scale: fp32 ``[E]``. made: zeros, an int32 a block
    and one more. PADDED: TOP_K rounded up to a power of two.
    """
    BLOCK_N: gl.constexpr = w2_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w2_desc.block_type.shape[1]
    STEPS: gl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    h_bufs = gl.allocate_shared_memory(h_desc.dtype, [SETS * STEPS * WGS, 64, BLOCK_K], h_desc.layout)
    w_bufs = gl.allocate_shared_memory(w2_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], w2_desc.layout)
    out_bufs = gl.allocate_shared_memory(y_desc.dtype, [2 * WGS, 64, BLOCK_N // 2], y_desc.layout)
    h_full, h_empty = make_barriers(SETS, 1, WGS)
    w_full, w_empty = make_barriers(STAGES, 1, WGS)
    launch_next()
    wait_for_last()
    tiles = gl.load(tile_count_ptr)
    h_ring = (h_bufs, h_full, h_empty)
    w_ring = (w_bufs, w_full, w_empty)
    y = (y_desc, y_ptr, pairs)
    result = (slots_ptr, weights_ptr, shared_ptr, out_ptr, tokens)
    if WGS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, y, made_ptr, tiles_ptr, scale_ptr, h_ring, w_ring, out_bufs, tiles,
                            H, WIDTH, STEPS, TILES_N, SETS, STAGES, WGS, SUM)),
                (_consume, (1, y, made_ptr, tiles_ptr, scale_ptr, h_ring, w_ring, out_bufs, tiles,
                            H, WIDTH, STEPS, TILES_N, SETS, STAGES, WGS, SUM)),
                (_sum, (y, result, made_ptr, tiles, H, TOP_K, PADDED, BLOCK_N, TILES_N, WGS, SUM)),
                (_produce, (h_desc, w2_desc, tiles_ptr, h_ring, w_ring, tiles, H, STEPS, TILES_N, SETS, STAGES, WGS)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, SUM_REGISTERS, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, y, made_ptr, tiles_ptr, scale_ptr, h_ring, w_ring, out_bufs, tiles,
                            H, WIDTH, STEPS, TILES_N, SETS, STAGES, WGS, SUM)),
                (_consume, (1, y, made_ptr, tiles_ptr, scale_ptr, h_ring, w_ring, out_bufs, tiles,
                            H, WIDTH, STEPS, TILES_N, SETS, STAGES, WGS, SUM)),
                (_consume, (2, y, made_ptr, tiles_ptr, scale_ptr, h_ring, w_ring, out_bufs, tiles,
                            H, WIDTH, STEPS, TILES_N, SETS, STAGES, WGS, SUM)),
                (_sum, (y, result, made_ptr, tiles, H, TOP_K, PADDED, BLOCK_N, TILES_N, WGS, SUM)),
                (_produce, (h_desc, w2_desc, tiles_ptr, h_ring, w_ring, tiles, H, STEPS, TILES_N, SETS, STAGES, WGS)),
            ],
            [4, 4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, SUM_REGISTERS, 24],
        )  # fmt: skip
