"""The router for few tokens in one launch: every CTA multiplies a slice of K, then a CTA for a token or two finishes.

All of a CTA's weights are requested at once, before it waits for the kernel that makes x, so the launch costs little
more than one trip to memory. The weights are wgmma's rows and the tokens its columns.

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
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from katydid_kernels.gemm.ring import launch_next, wait_for_last
from katydid_kernels.router.choose import choose_experts

__all__ = ["few_tokens_kernel", "finish_few", "multiply_slice", "new_barrier", "request_weights"]

# A NaN other than that of arithmetic, which takes its place should a product ever be it.
_EMPTY = gl.constexpr(-1)
_NAN = gl.constexpr(0x7FFFFFFF)


@gluon.jit
def new_barrier():
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    fence_async_shared()
    gl.thread_barrier()
    return barrier


@gluon.jit
def request_weights(
    w_desc, w_bufs, landed, first_expert, split, E_PAD: gl.constexpr, TERMS: gl.constexpr, DEPTH: gl.constexpr
):
    """The terms of 64 experts over slice `split` of K, on their way to `landed`."""
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    for d in gl.static_range(DEPTH):
        for term in gl.static_range(TERMS):
            tma.async_copy_global_to_shared(
                w_desc,
                [term * E_PAD + first_expert, (split * DEPTH + d) * BLOCK_K],
                landed,
                w_bufs.index(d * TERMS + term),
            )


@gluon.jit
def multiply_slice(
    x_bufs, w_bufs, partial_ptr, first_expert, split, tokens,
    E_PAD: gl.constexpr, TERMS: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Store the partial logits of a slice of K: 64 experts of every token."""
    TOKENS: gl.constexpr = x_bufs.type.shape[1]
    ROWS: gl.constexpr = w_bufs.type.shape[1]
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    # 256 bytes of a token's logits at once.
    lines: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
    acc = gl.zeros([ROWS, TOKENS], gl.float32, product)
    for d in gl.static_range(DEPTH):
        for term in gl.static_range(TERMS):
            x = x_bufs.index(d).permute((1, 0))
            acc = warpgroup_mma(w_bufs.index(d * TERMS + term), x, acc, use_acc=d + term > 0, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    bits = gl.convert_layout(acc, lines).to(gl.int32, bitcast=True)
    bits = gl.where(bits == _EMPTY, _NAN, bits)
    expert = first_expert + gl.arange(0, ROWS, gl.SliceLayout(1, lines))[:, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, lines))[None, :]
    gl.store(partial_ptr + (split * tokens + token) * E_PAD + expert, bits, mask=token < tokens)


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
    partial_ptr, choosing, tokens,
    E_PAD: gl.constexpr, SPLITS: gl.constexpr, POWER_S: gl.constexpr, AT_ONCE: gl.constexpr, TOP_K: gl.constexpr,
    POWER_K: gl.constexpr, SIGMOID: gl.constexpr, RENORMALISE: gl.constexpr,
):  # fmt: skip
    """The first CTAs choose the experts of AT_ONCE tokens each."""
    bias_ptr, scale, weights_ptr, ids_ptr, experts = choosing
    for row in range(gl.program_id(0) * AT_ONCE, tokens, gl.num_programs(0) * AT_ONCE):
        logits = _await_rows(partial_ptr, row, tokens, E_PAD, SPLITS, POWER_S, AT_ONCE)
        choose_experts(
            logits, row, tokens, experts, bias_ptr, scale, weights_ptr, ids_ptr, TOP_K, POWER_K, SIGMOID, RENORMALISE
        )


@gluon.jit(do_not_specialize=["tokens", "experts"])
def few_tokens_kernel(
    x_desc, w_desc, partial_ptr, bias_ptr, scale, weights_ptr, ids_ptr, tokens, experts,
    E_PAD: gl.constexpr, TERMS: gl.constexpr, DEPTH: gl.constexpr, SPLITS: gl.constexpr, POWER_S: gl.constexpr,
    AT_ONCE: gl.constexpr, TOP_K: gl.constexpr, POWER_K: gl.constexpr, SIGMOID: gl.constexpr,
    RENORMALISE: gl.constexpr,
):  # fmt: skip
    """A grid of ``SPLITS * E_PAD / 64`` CTAs, each for 64 experts and `DEPTH` blocks of K.

    x_desc: boxes ``[TOKENS, 64]``; w_desc: boxes ``[64, 64]`` of the terms ``[TERMS * E_PAD, K]``; partial: int32
    ``[SPLITS, tokens, E_PAD]``, all EMPTY between calls.
    """
    TOKENS: gl.constexpr = x_desc.block_type.shape[0]
    ROWS: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[1]
    E_TILES: gl.constexpr = E_PAD // ROWS
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [DEPTH, TOKENS, BLOCK_K], x_desc.layout)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [DEPTH * TERMS, ROWS, BLOCK_K], w_desc.layout)
    landed = new_barrier()
    launch_next()
    first_expert = gl.program_id(0) % E_TILES * ROWS
    split = gl.program_id(0) // E_TILES
    mbarrier.expect(landed, DEPTH * (TERMS * w_desc.block_type.nbytes + x_desc.block_type.nbytes))
    request_weights(w_desc, w_bufs, landed, first_expert, split, E_PAD, TERMS, DEPTH)
    wait_for_last()
    for d in gl.static_range(DEPTH):
        tma.async_copy_global_to_shared(x_desc, [0, (split * DEPTH + d) * BLOCK_K], landed, x_bufs.index(d))
    mbarrier.wait(landed, 0)
    multiply_slice(x_bufs, w_bufs, partial_ptr, first_expert, split, tokens, E_PAD, TERMS, DEPTH)
    finish_few(
        partial_ptr, (bias_ptr, scale, weights_ptr, ids_ptr, experts), tokens,
        E_PAD, SPLITS, POWER_S, AT_ONCE, TOP_K, POWER_K, SIGMOID, RENORMALISE,
    )  # fmt: skip
