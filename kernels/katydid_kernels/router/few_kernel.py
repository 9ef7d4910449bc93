"""The router for few tokens in one launch: every CTA multiplies a slice of K, then a CTA a token finishes.

All of a CTA's weights are requested at once, before it waits for the kernel that makes x, so the launch costs little
more than one trip to memory. The weights are wgmma's rows and the tokens its columns. The CTAs of the grid are few and
small enough to be on the GPU together, and wait for each other only once.
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

from katydid_kernels.gemm.ring import launch_next, wait_for_last
from katydid_kernels.router.choose import arrive, choose_experts, leave, summed_logits, wait_for

__all__ = ["few_tokens_kernel", "finish_few", "multiply_slice", "new_barrier", "request_weights"]


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
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 16])
    acc = gl.zeros([ROWS, TOKENS], gl.float32, layout)
    for d in gl.static_range(DEPTH):
        for term in gl.static_range(TERMS):
            x = x_bufs.index(d).permute((1, 0))
            acc = warpgroup_mma(w_bufs.index(d * TERMS + term), x, acc, use_acc=d + term > 0, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    expert = first_expert + gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))[None, :]
    gl.store(partial_ptr + (split * tokens + token) * E_PAD + expert, acc, mask=token < tokens)


@gluon.jit
def finish_few(
    partial_ptr, counter_ptr, choosing, tokens,
    E_PAD: gl.constexpr, SPLITS: gl.constexpr, POWER_S: gl.constexpr, POWER_E: gl.constexpr, TOP_K: gl.constexpr,
    POWER_K: gl.constexpr, SIGMOID: gl.constexpr, RENORMALISE: gl.constexpr,
):  # fmt: skip
    """Meet; then the first CTAs, one a token, choose its experts."""
    bias_ptr, scale, weights_ptr, ids_ptr, experts = choosing
    everyone = gl.num_programs(0)
    arrive(counter_ptr)
    if gl.program_id(0) < tokens:
        wait_for(counter_ptr, everyone)
        # A row lies whole in every warp, so choosing takes no exchange between warps.
        layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 1, 32], [4, 1, 1], [2, 1, 0])
        for row in range(gl.program_id(0), tokens, everyone):
            logits = summed_logits(partial_ptr, tokens * E_PAD, row, tokens, E_PAD, SPLITS, 1, layout, POWER_S, POWER_E)
            choose_experts(
                logits, row, tokens, experts, bias_ptr, scale, weights_ptr, ids_ptr,
                TOP_K, POWER_K, SIGMOID, RENORMALISE,
            )  # fmt: skip
        leave(counter_ptr, everyone + gl.minimum(everyone, tokens))


@gluon.jit(do_not_specialize=["tokens", "experts"])
def few_tokens_kernel(
    x_desc, w_desc, partial_ptr, counter_ptr, bias_ptr, scale, weights_ptr, ids_ptr, tokens, experts,
    E_PAD: gl.constexpr, TERMS: gl.constexpr, DEPTH: gl.constexpr, SPLITS: gl.constexpr, POWER_S: gl.constexpr,
    POWER_E: gl.constexpr, TOP_K: gl.constexpr, POWER_K: gl.constexpr, SIGMOID: gl.constexpr,
    RENORMALISE: gl.constexpr,
):  # fmt: skip
    """A grid of ``SPLITS * E_PAD / 64`` CTAs, each for 64 experts and `DEPTH` blocks of K.

    x_desc: boxes ``[TOKENS, 64]``; w_desc: boxes ``[64, 64]`` of the terms ``[TERMS * E_PAD, K]``; partial: fp32
    ``[SPLITS, tokens, E_PAD]``; counter: an int32, zero between calls.
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
        partial_ptr, counter_ptr, (bias_ptr, scale, weights_ptr, ids_ptr, experts), tokens,
        E_PAD, SPLITS, POWER_S, POWER_E, TOP_K, POWER_K, SIGMOID, RENORMALISE,
    )  # fmt: skip
