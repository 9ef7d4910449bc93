"""The router for many tokens: a warp-specialised GEMM over tiles of 128 tokens, cut along K where tiles are few.

A producer warp fills a ring of stages by TMA, 32 of K each: 128 tokens once, the weights' terms beside them. One to
three consumer warpgroups multiply 64 experts each with all tokens of the stage: weights are wgmma's rows, so that the
tokens, its columns, are read from shared memory in as few instructions as may be. After eight stages the accumulator is
added to the total in fp32 and begun anew, because the tensor cores' own sum loses bits over a long K; the others
multiply meanwhile.

Partial logits go through scratch that stays in L2. The CTAs of a tile are neighbours in the grid, and no more than the
GPU holds: they meet at a counter, and each chooses the experts of its share of the tile's tokens; the last one to leave
sets the counter back to zero. Sums are taken in a fixed order.
"""

# Inside a kernel tuples are joined by +, and grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,index,misc,var-annotated"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from katydid_kernels.gemm.ring import advance, before, launch_next, make_barriers, wait_for_last
from katydid_kernels.router.choose import choose_experts

__all__ = ["many_tokens_kernel"]

_STAGES_A_SUM = gl.constexpr(16)


@gluon.jit
def _request_weights(w_desc, w_bufs, ready, stage, k, first_expert, E_PAD: gl.constexpr, TERMS: gl.constexpr):
    ROWS: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    WGS: gl.constexpr = w_bufs.type.shape[0] // (ready.type.shape[0] * TERMS)
    for term in gl.static_range(TERMS):
        for part in gl.static_range(WGS):
            tma.async_copy_global_to_shared(
                w_desc,
                [term * E_PAD + first_expert + part * ROWS, k * BLOCK_K],
                ready.index(stage),
                w_bufs.index((stage * TERMS + term) * WGS + part),
            )


@gluon.jit
def _produce(x_desc, w_desc, ring, place, E_PAD: gl.constexpr, TERMS: gl.constexpr):
    x_bufs, w_bufs, full, empty = ring
    row, first_expert, first_k, last_k = place
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    STAGES: gl.constexpr = full.type.shape[0]
    WGS: gl.constexpr = w_bufs.type.shape[0] // (STAGES * TERMS)
    STAGE_BYTES: gl.constexpr = x_desc.block_type.nbytes + TERMS * WGS * w_desc.block_type.nbytes
    # Weights are there from the start; x is when the kernel before has finished.
    for i in gl.static_range(STAGES):
        if first_k + i < last_k:
            mbarrier.expect(full.index(i), STAGE_BYTES)
            _request_weights(w_desc, w_bufs, full, i, first_k + i, first_expert, E_PAD, TERMS)
    wait_for_last()
    for i in gl.static_range(STAGES):
        if first_k + i < last_k:
            tma.async_copy_global_to_shared(x_desc, [row, (first_k + i) * BLOCK_K], full.index(i), x_bufs.index(i))
    stage = 0
    phase = 0
    for k in range(first_k + STAGES, last_k):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), STAGE_BYTES)
        _request_weights(w_desc, w_bufs, full, stage, k, first_expert, E_PAD, TERMS)
        tma.async_copy_global_to_shared(x_desc, [row, k * BLOCK_K], full.index(stage), x_bufs.index(stage))
        stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def _multiply(WHO: gl.constexpr, ring, first_k, last_k, layout: gl.constexpr, TERMS: gl.constexpr):
    """fp32 ``[64, 128]``: this warpgroup's experts by the tile's tokens over a slice of K."""
    x_bufs, w_bufs, full, empty = ring
    ROWS: gl.constexpr = w_bufs.type.shape[1]
    TOKENS: gl.constexpr = x_bufs.type.shape[1]
    STAGES: gl.constexpr = full.type.shape[0]
    WGS: gl.constexpr = w_bufs.type.shape[0] // (STAGES * TERMS)
    total = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    stage = 0
    phase = 0
    for begin in range(first_k, last_k, _STAGES_A_SUM):
        part = gl.zeros([ROWS, TOKENS], gl.float32, layout)
        for k in range(begin, gl.minimum(begin + _STAGES_A_SUM, last_k)):
            mbarrier.wait(full.index(stage), phase)
            x = x_bufs.index(stage).permute((1, 0))
            for term in gl.static_range(TERMS):
                w = w_bufs.index((stage * TERMS + term) * WGS + WHO)
                part = warpgroup_mma(w, x, part, use_acc=(k > begin) | (term > 0), is_async=True)
            part = warpgroup_mma_wait(TERMS, deps=(part,))
            mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=k > begin)
            stage, phase = advance(stage, phase, STAGES)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
        total += part
    return total


@gluon.jit
def _halves(x):
    """The left and right half of an accumulator's columns: the split of its registers, nothing moves."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, x.shape[1] // 2, 16])
    left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)).split()
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def _store_piece(piece, partial_ptr, split_row, row, tokens, first_expert, E_PAD: gl.constexpr):
    """Partial logits ``[64, 32]`` of experts by tokens, 256 bytes of a token at once."""
    lines: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    values = gl.convert_layout(piece.permute((1, 0)), lines)
    token = row + gl.arange(0, values.shape[0], gl.SliceLayout(1, lines))[:, None]
    expert = first_expert + gl.arange(0, values.shape[1], gl.SliceLayout(0, lines))[None, :]
    gl.store(partial_ptr + (split_row + token) * E_PAD + expert, values, mask=token < tokens)


@gluon.jit
def _arrive(counter_ptr):
    """Publish what this warpgroup has stored."""
    gl.thread_barrier()
    gl.atomic_add(counter_ptr, 1, sem="release")


@gluon.jit
def _wait_for(counter_ptr, count):
    """Spin until `count` have arrived; what they published is then visible."""
    seen = 0
    while seen < count:
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter_ptr], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _leave(counter_ptr, everyone):
    """Called once by each who waited; the last of `everyone` who arrives or leaves resets the counter."""
    gl.thread_barrier()
    if gl.atomic_add(counter_ptr, 1, sem="relaxed") == everyone - 1:
        gl.store(counter_ptr, 0)


@gluon.jit
def _summed_logits(
    partial_ptr, tokens, row, end, E_PAD: gl.constexpr, SPLITS: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """Rows from `row` of partial logits ``[SPLITS, tokens, E_PAD]`` as chunks of ``[ROWS, 64]``."""
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    expert = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    source = partial_ptr + (split * tokens + rows) * E_PAD + expert
    inside = (split >= 0) & (rows < end) & (expert >= 0)
    logits = ()
    for c in gl.static_range(E_PAD // 64):
        # Past the L1, which may hold an older line.
        logits = logits + (gl.sum(gl.load(source + c * 64, mask=inside, other=0.0, cache_modifier=".cg"), 0),)
    return logits


@gluon.jit
def _consume(
    WHO: gl.constexpr, partial_ptr, counter_ptr, choosing, ring, place, split, tokens,
    E_PAD: gl.constexpr, TERMS: gl.constexpr, WGS: gl.constexpr, SPLITS: gl.constexpr,
    TOP_K: gl.constexpr, POWER_K: gl.constexpr, SIGMOID: gl.constexpr, RENORMALISE: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    x_bufs, w_bufs, _, _ = ring
    row, first_expert, first_k, last_k = place
    bias_ptr, scale, weights_ptr, ids_ptr, experts = choosing
    ROWS: gl.constexpr = w_bufs.type.shape[1]
    TOKENS: gl.constexpr = x_bufs.type.shape[1]
    # Where this slice of K is empty, nothing else has waited for the kernel before.
    wait_for_last()
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    total = _multiply(WHO, ring, first_k, last_k, product, TERMS)
    first = first_expert + WHO * ROWS
    left, right = _halves(total)
    first_piece, second_piece = _halves(left)
    third_piece, fourth_piece = _halves(right)
    pieces = (first_piece, second_piece, third_piece, fourth_piece)
    for i in gl.static_range(4):
        _store_piece(pieces[i], partial_ptr, split * tokens, row + i * (TOKENS // 4), tokens, first, E_PAD)

    # Even alone a CTA's warpgroups meet: each has a third of the experts.
    WAITERS: gl.constexpr = SPLITS * (E_PAD // ROWS)
    _arrive(counter_ptr)
    _wait_for(counter_ptr, WAITERS)
    # The tile's tokens in equal shares; CTAs of later experts have none.
    SHARE: gl.constexpr = TOKENS // SPLITS
    # A row a warp, whose reductions are single instructions; four where there are many rows and time to hide shuffles.
    LANES: gl.constexpr = min(32, 8 * SPLITS)
    AT_ONCE: gl.constexpr = 4 * 32 // LANES
    block: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 32 // LANES, LANES], [1, 4, 1], [2, 1, 0])
    if first_expert == 0:
        begin = row + split * SHARE
        end = gl.minimum(begin + SHARE, tokens)
        for first in range(begin + WHO * AT_ONCE, end, WGS * AT_ONCE):
            logits = _summed_logits(partial_ptr, tokens, first, end, E_PAD, SPLITS, AT_ONCE, block)
            choose_experts(
                logits, first, end, experts, bias_ptr, scale, weights_ptr, ids_ptr, TOP_K, POWER_K, SIGMOID,
                RENORMALISE, SHARED,
            )  # fmt: skip
    _leave(counter_ptr, 2 * WAITERS)


@gluon.jit(do_not_specialize=["tokens", "experts"])
def many_tokens_kernel(
    x_desc, w_desc, partial_ptr, counter_ptr, bias_ptr, scale, weights_ptr, ids_ptr, tokens, experts, blocks_k,
    E_PAD: gl.constexpr, TERMS: gl.constexpr, WGS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    TOP_K: gl.constexpr, POWER_K: gl.constexpr, SIGMOID: gl.constexpr, RENORMALISE: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """A CTA a tile of 128 tokens, tile of ``64 * WGS`` experts and slice of K.

    x_desc: boxes ``[128, BLOCK_K]``; w_desc: boxes ``[64, BLOCK_K]`` of the terms ``[TERMS * E_PAD, K]``; partial: fp32
    ``[SPLITS, tokens, E_PAD]``; counter: int32, zero between calls, one a tile of tokens; blocks_k: blocks in K.
    """
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = x_desc.block_type.shape[1]
    ROWS: gl.constexpr = w_desc.block_type.shape[0]
    E_TILES: gl.constexpr = E_PAD // (ROWS * WGS)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, TOKENS, BLOCK_K], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [STAGES * TERMS * WGS, ROWS, BLOCK_K], w_desc.layout)
    full, empty = make_barriers(STAGES, 1, WGS)
    launch_next()
    tile = gl.program_id(0) // (SPLITS * E_TILES)
    split = gl.program_id(0) // E_TILES % SPLITS
    first_expert = gl.program_id(0) % E_TILES * (ROWS * WGS)
    place = (tile * TOKENS, first_expert, blocks_k * split // SPLITS, blocks_k * (split + 1) // SPLITS)
    ring = (x_bufs, w_bufs, full, empty)
    choosing = (bias_ptr, scale, weights_ptr, ids_ptr, experts)
    counter = counter_ptr + tile
    if WGS == 1:
        gl.warp_specialize(
            [
                (_consume, (0, partial_ptr, counter, choosing, ring, place, split, tokens, E_PAD, TERMS, WGS, SPLITS,
                            TOP_K, POWER_K, SIGMOID, RENORMALISE, SHARED)),
                (_produce, (x_desc, w_desc, ring, place, E_PAD, TERMS)),
            ],
            [1],
            [24],
        )  # fmt: skip
    elif WGS == 2:
        gl.warp_specialize(
            [
                (_consume, (0, partial_ptr, counter, choosing, ring, place, split, tokens, E_PAD, TERMS, WGS, SPLITS,
                            TOP_K, POWER_K, SIGMOID, RENORMALISE, SHARED)),
                (_consume, (1, partial_ptr, counter, choosing, ring, place, split, tokens, E_PAD, TERMS, WGS, SPLITS,
                            TOP_K, POWER_K, SIGMOID, RENORMALISE, SHARED)),
                (_produce, (x_desc, w_desc, ring, place, E_PAD, TERMS)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (0, partial_ptr, counter, choosing, ring, place, split, tokens, E_PAD, TERMS, WGS, SPLITS,
                            TOP_K, POWER_K, SIGMOID, RENORMALISE, SHARED)),
                (_consume, (1, partial_ptr, counter, choosing, ring, place, split, tokens, E_PAD, TERMS, WGS, SPLITS,
                            TOP_K, POWER_K, SIGMOID, RENORMALISE, SHARED)),
                (_consume, (2, partial_ptr, counter, choosing, ring, place, split, tokens, E_PAD, TERMS, WGS, SPLITS,
                            TOP_K, POWER_K, SIGMOID, RENORMALISE, SHARED)),
                (_produce, (x_desc, w_desc, ring, place, E_PAD, TERMS)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip
