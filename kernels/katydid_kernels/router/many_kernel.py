"""The router for many tokens: a warp-specialised GEMM over tiles of 128 tokens, cut along K where tiles are few.

A producer warp fills a ring of stages by TMA, 64 of K each: the tokens once, the weights' terms beside them. Two
consumer warpgroups of 64 tokens multiply a stage into a fresh accumulator and add it to the total in fp32, because the
tensor cores' own sum loses bits over a long K; meanwhile the other one multiplies. Partial logits go through scratch
that stays in L2. The CTAs of a tile are neighbours in the grid, and no more than the GPU holds: they meet, and each
chooses the experts of its share of the tile's tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from katydid_kernels.gemm.ring import advance, launch_next, make_barriers, wait_for_last
from katydid_kernels.router.choose import arrive, choose_experts, leave, summed_logits, wait_for

__all__ = ["many_tokens_kernel"]


@gluon.jit
def _produce(x_desc, w_desc, ring, place, E_PAD: gl.constexpr, TERMS: gl.constexpr, CHUNKS: gl.constexpr):
    x_bufs, w_bufs, full, empty = ring
    row, first_expert, first_k, last_k = place
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    CHUNK: gl.constexpr = w_desc.block_type.shape[0]
    STAGES: gl.constexpr = full.type.shape[0]
    stage = 0
    phase = 1
    for k in range(first_k, last_k):
        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(ready, 2 * x_desc.block_type.nbytes + TERMS * CHUNKS * w_desc.block_type.nbytes)
        for part in gl.static_range(2):
            tma.async_copy_global_to_shared(
                x_desc, [row + part * ROWS, k * BLOCK_K], ready, x_bufs.index(stage * 2 + part)
            )
        for term in gl.static_range(TERMS):
            for chunk in gl.static_range(CHUNKS):
                tma.async_copy_global_to_shared(
                    w_desc,
                    [term * E_PAD + first_expert + chunk * CHUNK, k * BLOCK_K],
                    ready,
                    w_bufs.index((stage * TERMS + term) * CHUNKS + chunk),
                )
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _start(x, w_bufs, stage, chunk, layout: gl.constexpr, TERMS: gl.constexpr, CHUNKS: gl.constexpr):
    """Begin the product of one stage's tokens with one chunk of experts, all terms into one accumulator."""
    ROWS: gl.constexpr = x.type.shape[0]
    CHUNK: gl.constexpr = w_bufs.type.shape[1]
    part = gl.zeros([ROWS, CHUNK], gl.float32, layout)
    for term in gl.static_range(TERMS):
        w = w_bufs.index((stage * TERMS + term) * CHUNKS + chunk).permute((1, 0))
        part = warpgroup_mma(x, w, part, use_acc=term > 0, is_async=True)
    return part


@gluon.jit
def _store_chunk(total, chunk: gl.constexpr, partial_ptr, split, row, tokens, first_expert, E_PAD: gl.constexpr):
    layout: gl.constexpr = total.type.layout
    rows = row + gl.arange(0, total.shape[0], gl.SliceLayout(1, layout))[:, None]
    expert = first_expert + chunk * total.shape[1] + gl.arange(0, total.shape[1], gl.SliceLayout(0, layout))[None, :]
    target = partial_ptr + (split * tokens + rows) * E_PAD + expert
    gl.store(target, total, mask=rows < tokens)


@gluon.jit
def _consume(
    WHO: gl.constexpr, partial_ptr, counter_ptr, choosing, ring, place, tile, split, tokens,
    E_PAD: gl.constexpr, TERMS: gl.constexpr, CHUNKS: gl.constexpr, SPLITS: gl.constexpr, POWER_E: gl.constexpr,
    TOP_K: gl.constexpr, POWER_K: gl.constexpr, SIGMOID: gl.constexpr, RENORMALISE: gl.constexpr,
):  # fmt: skip
    x_bufs, w_bufs, full, empty = ring
    row, first_expert, first_k, last_k = place
    bias_ptr, scale, weights_ptr, ids_ptr, experts = choosing
    ROWS: gl.constexpr = x_bufs.type.shape[1]
    CHUNK: gl.constexpr = w_bufs.type.shape[1]
    STAGES: gl.constexpr = full.type.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    total0 = gl.zeros([ROWS, CHUNK], gl.float32, layout)
    total1 = gl.zeros([ROWS, CHUNK], gl.float32, layout)
    total2 = gl.zeros([ROWS, CHUNK], gl.float32, layout)
    stage = 0
    phase = 0
    for _ in range(first_k, last_k):
        mbarrier.wait(full.index(stage), phase)
        x = x_bufs.index(stage * 2 + WHO)
        part0 = _start(x, w_bufs, stage, 0, layout, TERMS, CHUNKS)
        if CHUNKS > 1:
            part1 = _start(x, w_bufs, stage, 1, layout, TERMS, CHUNKS)
        if CHUNKS > 2:
            part2 = _start(x, w_bufs, stage, 2, layout, TERMS, CHUNKS)
        if CHUNKS == 1:
            part0 = warpgroup_mma_wait(0, deps=(part0,))
        elif CHUNKS == 2:
            part0, part1 = warpgroup_mma_wait(0, deps=(part0, part1))
        else:
            part0, part1, part2 = warpgroup_mma_wait(0, deps=(part0, part1, part2))
        mbarrier.arrive(empty.index(stage), count=1)
        total0 += part0
        if CHUNKS > 1:
            total1 += part1
        if CHUNKS > 2:
            total2 += part2
        stage, phase = advance(stage, phase, STAGES)
    my_row = row + WHO * ROWS
    _store_chunk(total0, 0, partial_ptr, split, my_row, tokens, first_expert, E_PAD)
    if CHUNKS > 1:
        _store_chunk(total1, 1, partial_ptr, split, my_row, tokens, first_expert, E_PAD)
    if CHUNKS > 2:
        _store_chunk(total2, 2, partial_ptr, split, my_row, tokens, first_expert, E_PAD)

    E_TILES: gl.constexpr = E_PAD // (CHUNK * CHUNKS)
    WAITERS: gl.constexpr = 2 * SPLITS * E_TILES
    if SPLITS * E_TILES > 1:
        arrive(counter_ptr + tile)
        wait_for(counter_ptr + tile, WAITERS)
    else:
        gl.thread_barrier()
    # The tile's rows in equal shares; those of the second tile of experts have none.
    SHARE: gl.constexpr = ROWS // SPLITS
    # 64 values a thread at once.
    LANES: gl.constexpr = min(32, max(8, SPLITS * POWER_E // 64))
    AT_ONCE: gl.constexpr = 4 * 32 // LANES
    block: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32 // LANES, LANES], [1, 4, 1], [2, 1, 0])
    if first_expert == 0:
        begin = row + (split * 2 + WHO) * SHARE
        end = gl.minimum(begin + SHARE, tokens)
        for first in range(begin, end, AT_ONCE):
            logits = summed_logits(
                partial_ptr, tokens * E_PAD, first, end, E_PAD, SPLITS, AT_ONCE, block, SPLITS, POWER_E
            )
            choose_experts(
                logits, first, end, experts, bias_ptr, scale, weights_ptr, ids_ptr, TOP_K, POWER_K, SIGMOID, RENORMALISE
            )
    if SPLITS * E_TILES > 1:
        leave(counter_ptr + tile, 2 * WAITERS)


@gluon.jit(do_not_specialize=["tokens", "experts"])
def many_tokens_kernel(
    x_desc, w_desc, partial_ptr, counter_ptr, bias_ptr, scale, weights_ptr, ids_ptr, tokens, experts, blocks_k,
    E_PAD: gl.constexpr, TERMS: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    POWER_E: gl.constexpr, TOP_K: gl.constexpr, POWER_K: gl.constexpr, SIGMOID: gl.constexpr,
    RENORMALISE: gl.constexpr,
):  # fmt: skip
    """A CTA a tile of 128 tokens, tile of ``64 * CHUNKS`` experts and slice of K.

    x_desc: boxes ``[64, 64]``; w_desc: boxes ``[64, 64]`` of the terms ``[TERMS * E_PAD, K]``; partial: fp32
    ``[SPLITS, tokens, E_PAD]``; counter: int32, zero between calls, one a tile of tokens; blocks_k: blocks of 64 in K.
    """
    ROWS: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    CHUNK: gl.constexpr = w_desc.block_type.shape[0]
    E_TILES: gl.constexpr = E_PAD // (CHUNK * CHUNKS)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, ROWS, BLOCK_K], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES * TERMS * CHUNKS, CHUNK, BLOCK_K], w_desc.layout)
    full, empty = make_barriers(STAGES, 1, 2)
    launch_next()
    wait_for_last()
    tile = gl.program_id(0) // (SPLITS * E_TILES)
    split = gl.program_id(0) // E_TILES % SPLITS
    first_expert = gl.program_id(0) % E_TILES * (CHUNK * CHUNKS)
    place = (tile * (2 * ROWS), first_expert, blocks_k * split // SPLITS, blocks_k * (split + 1) // SPLITS)
    ring = (x_bufs, w_bufs, full, empty)
    choosing = (bias_ptr, scale, weights_ptr, ids_ptr, experts)
    gl.warp_specialize(
        [
            (_consume, (0, partial_ptr, counter_ptr, choosing, ring, place, tile, split, tokens, E_PAD, TERMS, CHUNKS,
                        SPLITS, POWER_E, TOP_K, POWER_K, SIGMOID, RENORMALISE)),
            (_consume, (1, partial_ptr, counter_ptr, choosing, ring, place, tile, split, tokens, E_PAD, TERMS, CHUNKS,
                        SPLITS, POWER_E, TOP_K, POWER_K, SIGMOID, RENORMALISE)),
            (_produce, (x_desc, w_desc, ring, place, E_PAD, TERMS, CHUNKS)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
