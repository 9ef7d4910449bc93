"""The router for few tokens in one launch: every CTA multiplies a slice of K, then a CTA for a token or two finishes.

All of a CTA's weights, 64 experts, are requested at once, before it waits for the kernel that makes x, so the launch
costs little more than one trip to memory. It reads a slice of a group of tokens: several groups are several times the
CTAs, which share the choosing.

Partial logits are handed over without counters or fences, as Lamport's queue does: the place of a value that has not
arrived holds EMPTY, which no product is, and whoever reads a value puts EMPTY back for the next launch. The CTAs of the
grid are few and small enough to be on the GPU together.
"""

# Inside a kernel tuples are joined by +, and grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,index,misc,var-annotated"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from katydid_kernels.gemm.ring import launch_next, wait_for_last
from katydid_kernels.router.choose import choose_experts
from katydid_kernels.router.place import lay_out_pairs, rank_pairs

__all__ = ["few_tokens_kernel", "finish_few", "multiply_slice", "new_barriers", "request_weights"]

# A NaN other than that of arithmetic, which takes its place should a product ever be it.
_EMPTY = gl.constexpr(-1)
_NAN = gl.constexpr(0x7FFFFFFF)


@gluon.jit
def new_barriers(COUNT: gl.constexpr):
    """As many mbarriers, each for the copies of one part of the weights."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    return barriers


@gluon.jit
def request_weights(w_desc, w_bufs, landed, first_expert, split, E_PAD: gl.constexpr):
    """The terms of a tile of experts over slice `split` of K, on their way."""
    PARTS: gl.constexpr = landed.type.shape[0]
    TERMS: gl.constexpr = w_bufs.type.shape[0] // PARTS
    DEPTH: gl.constexpr = w_desc.block_type.shape[0]
    for part in gl.static_range(PARTS):
        ready = landed.index(part)
        mbarrier.expect(ready, TERMS * w_desc.block_type.nbytes)
        for term in gl.static_range(TERMS):
            place = [(split * PARTS + part) * DEPTH, term * E_PAD + first_expert, 0]
            tma.async_copy_global_to_shared(w_desc, place, ready, w_bufs.index(part * TERMS + term))


@gluon.jit
def _request_tokens(x_ptr, x_pitch, x_bufs, split, tokens):
    """A slice of x's first `tokens` rows, each part a group of copies. The rows of tokens that are not there keep what
    they held: they only reach logits that are never stored."""
    PARTS: gl.constexpr = x_bufs.type.shape[0]
    DEPTH: gl.constexpr = x_bufs.type.shape[1]
    TOKENS: gl.constexpr = x_bufs.type.shape[2]
    BLOCK_K: gl.constexpr = x_bufs.type.shape[3]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [4, 1], [1, 0])
    row = gl.arange(0, DEPTH * TOKENS, gl.SliceLayout(1, layout))[:, None]
    token = row % TOKENS
    source = x_ptr + token * (x_pitch * 8) + (split * (PARTS * DEPTH) + row // TOKENS) * BLOCK_K
    source += gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))[None, :]
    for part in gl.static_range(PARTS):
        x_part = x_bufs.index(part).reshape([DEPTH * TOKENS, BLOCK_K])
        async_copy.async_copy_global_to_shared(x_part, source + part * (DEPTH * BLOCK_K), mask=token < tokens)
        async_copy.commit_group()


@gluon.jit
def multiply_slice(
    x_bufs, w_bufs, landed, partial_ptr, first_expert, first_token, end, split, tokens, E_PAD: gl.constexpr
):  # fmt: skip
    """Store the partial logits of a slice of K: 64 experts, wgmma's rows, of tokens `first_token` to `end`, its
    columns."""
    PARTS: gl.constexpr = x_bufs.type.shape[0]
    DEPTH: gl.constexpr = x_bufs.type.shape[1]
    TOKENS: gl.constexpr = x_bufs.type.shape[2]
    BLOCK_K: gl.constexpr = x_bufs.type.shape[3]
    TERMS: gl.constexpr = w_bufs.type.shape[0] // PARTS
    EXPERTS: gl.constexpr = w_bufs.type.shape[2]
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    acc = gl.zeros([EXPERTS, TOKENS], gl.float32, product)
    for part in gl.static_range(PARTS):
        async_copy.wait_group(PARTS - 1 - part)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.wait(landed.index(part), 0)
        x_part = x_bufs.index(part).reshape([DEPTH * TOKENS, BLOCK_K])
        for d in gl.static_range(DEPTH):
            x = x_part.slice(d * TOKENS, TOKENS).permute((1, 0))
            for term in gl.static_range(TERMS):
                w_part = w_bufs.index(part * TERMS + term).reshape([DEPTH * EXPERTS, BLOCK_K])
                w = w_part.slice(d * EXPERTS, EXPERTS)
                acc = warpgroup_mma(w, x, acc, use_acc=part + d + term > 0, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,)).permute((1, 0))
    # Up to 256 bytes of a token's logits at once.
    lines: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    bits = gl.convert_layout(acc, lines).to(gl.int32, bitcast=True)
    bits = gl.where(bits == _EMPTY, _NAN, bits)
    token = first_token + gl.arange(0, TOKENS, gl.SliceLayout(1, lines))[:, None]
    expert = first_expert + gl.arange(0, EXPERTS, gl.SliceLayout(0, lines))[None, :]
    gl.store(partial_ptr + (split * tokens + token) * E_PAD + expert, bits, mask=token < end)


@gluon.jit
def _await_rows(
    partial_ptr, row, tokens, E_PAD: gl.constexpr, SPLITS: gl.constexpr, POWER_S: gl.constexpr, ROWS: gl.constexpr
):  # fmt: skip
    """Logits from row `row` as chunks of ``[ROWS, 64]``, once all parts have arrived; summed in a fixed order."""
    CHUNKS: gl.constexpr = E_PAD // 64
    # A row lies whole in a warp, so choosing takes no exchange between warps.
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 1, 32], [4 // ROWS, ROWS, 1], [2, 1, 0])
    split = gl.arange(0, POWER_S, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    expert = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    source = partial_ptr + (split * tokens + rows) * E_PAD + expert
    inside = (split < SPLITS) & (rows < tokens) & (expert >= 0)
    parts = ()
    for _ in gl.static_range(CHUNKS):
        parts = parts + (gl.full([POWER_S, ROWS, 64], _EMPTY, gl.int32, layout),)
    missing = 1
    while missing > 0:
        parts = ()
        empty = gl.zeros([POWER_S, ROWS, 64], gl.int32, layout)
        for c in gl.static_range(CHUNKS):
            part = gl.load(source + c * 64, mask=inside, other=0, volatile=True)
            empty |= (part == _EMPTY).to(gl.int32)
            parts = parts + (part,)
        missing = gl.max(gl.max(gl.max(empty, 2), 1), 0)
    logits = ()
    for c in gl.static_range(CHUNKS):
        gl.store(source + c * 64, gl.full([POWER_S, ROWS, 64], _EMPTY, gl.int32, layout), mask=inside)
        logits = logits + (gl.sum(parts[c].to(gl.float32, bitcast=True), 0),)
    return logits


@gluon.jit
def finish_few(
    partial_ptr, choosing, place, tokens,
    E_PAD: gl.constexpr, SPLITS: gl.constexpr, POWER_S: gl.constexpr, AT_ONCE: gl.constexpr, TOP_K: gl.constexpr,
    POWER_K: gl.constexpr, SIGMOID: gl.constexpr, RENORMALISE: gl.constexpr, SHARED: gl.constexpr,
    TILE: gl.constexpr, BLOCK: gl.constexpr, BLOCK_E: gl.constexpr,
):  # fmt: skip
    """The first CTAs choose the experts of AT_ONCE tokens each; with TILE the pairs are placed, too."""
    bias_ptr, scale, weights_ptr, ids_ptr, experts = choosing
    for row in range(gl.program_id(0) * AT_ONCE, tokens, gl.num_programs(0) * AT_ONCE):
        logits = _await_rows(partial_ptr, row, tokens, E_PAD, SPLITS, POWER_S, AT_ONCE)
        ids, choice, rows, inside = choose_experts(
            logits, row, tokens, experts, bias_ptr, scale, weights_ptr, ids_ptr, TOP_K, POWER_K, SIGMOID,
            RENORMALISE, SHARED,
        )  # fmt: skip
        if TILE > 0:
            rank_pairs(place, ids, choice, rows, inside, TOP_K + SHARED)
    if TILE > 0:
        choosing_ctas = gl.minimum(gl.num_programs(0), (tokens + AT_ONCE - 1) // AT_ONCE)
        if gl.program_id(0) < choosing_ctas:
            pairs = tokens * (TOP_K + SHARED)
            lay_out_pairs(place, ids_ptr, pairs, choosing_ctas, TOP_K + SHARED, TILE, BLOCK, BLOCK_E)


@gluon.jit(do_not_specialize=["tokens", "experts", "first_expert_here", "experts_here"])
def few_tokens_kernel(
    x_ptr, x_pitch, w_desc, partial_ptr, bias_ptr, scale, weights_ptr, ids_ptr, tokens, experts,
    counts_ptr, rows_ptr, slots_ptr, tiles_ptr, tile_count_ptr, first_expert_here, experts_here,
    TOKENS: gl.constexpr, GROUP: gl.constexpr, X_LAYOUT: gl.constexpr, E_PAD: gl.constexpr, TERMS: gl.constexpr,
    PARTS: gl.constexpr, SPLITS: gl.constexpr, POWER_S: gl.constexpr, AT_ONCE: gl.constexpr, TOP_K: gl.constexpr,
    POWER_K: gl.constexpr, SIGMOID: gl.constexpr, RENORMALISE: gl.constexpr, SHARED: gl.constexpr,
    TILE: gl.constexpr, BLOCK: gl.constexpr, BLOCK_E: gl.constexpr,
):  # fmt: skip
    """A grid of ``SPLITS * E_PAD / EXPERTS`` CTAs for every GROUP of tokens, each for a tile of experts and ``PARTS *
    DEPTH`` blocks of K.

    x: bf16 ``[tokens, K]``, a row every `x_pitch` times 16 bytes; w_desc: boxes ``[DEPTH, EXPERTS, 64]``, EXPERTS 64,
    of the terms seen as ``[K / 64, TERMS * E_PAD, 64]``. TOKENS: 8 or more, at least those of a group. partial: int32
    ``[SPLITS, tokens, E_PAD]``, all EMPTY between calls. TILE: rows of a tile of the pairs' plan, whose tensors come
    then; 0 for no plan. BLOCK, BLOCK_E: powers of two, at least the pairs and the experts of this rank.
    """
    DEPTH: gl.constexpr = w_desc.block_type.shape[0]
    EXPERTS: gl.constexpr = w_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[2]
    E_TILES: gl.constexpr = E_PAD // EXPERTS
    x_bufs = gl.allocate_shared_memory(w_desc.dtype, [PARTS, DEPTH, TOKENS, BLOCK_K], X_LAYOUT)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [PARTS * TERMS, DEPTH, EXPERTS, BLOCK_K], w_desc.layout)
    landed = new_barriers(PARTS)
    launch_next()
    first_expert = gl.program_id(0) % E_TILES * EXPERTS
    split = gl.program_id(0) // E_TILES % SPLITS
    first_token = gl.program_id(0) // (E_TILES * SPLITS) * GROUP
    end = gl.minimum(first_token + GROUP, tokens)
    request_weights(w_desc, w_bufs, landed, first_expert, split, E_PAD)
    wait_for_last()
    # Not by TMA: its descriptor of x would have to be fetched first, while everything waits.
    _request_tokens(x_ptr + first_token * (x_pitch * 8), x_pitch, x_bufs, split, end - first_token)
    multiply_slice(x_bufs, w_bufs, landed, partial_ptr, first_expert, first_token, end, split, tokens, E_PAD)
    place = (counts_ptr, rows_ptr, slots_ptr, tiles_ptr, tile_count_ptr, first_expert_here, experts_here)
    finish_few(
        partial_ptr, (bias_ptr, scale, weights_ptr, ids_ptr, experts), place, tokens,
        E_PAD, SPLITS, POWER_S, AT_ONCE, TOP_K, POWER_K, SIGMOID, RENORMALISE, SHARED, TILE, BLOCK, BLOCK_E,
    )  # fmt: skip
