"""Residual addition, RMSNorm, quantisation and the router for a handful of tokens in one launch.

The few-token router with its own x: each CTA reads the rows whole to know their norm (16 KB a token out of L2, which is
why it is for a handful), and makes the slice of x that it multiplies. The CTAs of the first 64 experts store theirs.
"""

# Inside a kernel tuples are joined by +, and grow.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment,index,misc,var-annotated"
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from katydid_kernels.gemm.ring import launch_next, wait_for_last
from katydid_kernels.router.few_kernel import finish_few, multiply_slice, new_barriers, request_weights

__all__ = ["normed_router_kernel"]


@gluon.jit
def _row_facts(
    x_ptr, residual_ptr, norm_ptr, strides, tokens, eps, HIDDEN: gl.constexpr, ROWS: gl.constexpr, SCALED: gl.constexpr
):
    """``1 / rms`` of each row of x + residual, and where it sets the scale the largest ``|y|``; both ``[ROWS]``."""
    x_stride, residual_stride = strides
    BLOCK: gl.constexpr = 1024
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    squares = gl.zeros([ROWS, BLOCK], gl.float32, layout)
    largest = gl.zeros([ROWS, BLOCK], gl.float32, layout)
    for start in gl.static_range(0, HIDDEN, BLOCK):
        col = start + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))[None, :]
        inside = (row < tokens) & (col < HIDDEN)
        total = gl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0).to(gl.float32)
        total += gl.load(residual_ptr + row * residual_stride + col, mask=inside, other=0.0).to(gl.float32)
        total = total.to(x_ptr.dtype.element_ty).to(gl.float32)
        squares += total * total
        if SCALED:
            gain = gl.load(norm_ptr + col, mask=col < HIDDEN, other=0.0).to(gl.float32)
            largest = gl.maximum(largest, gl.abs(total * gain))
    factor = gl.rsqrt(gl.sum(squares, 1) / HIDDEN + eps)
    # y is rounded before it is quantised.
    return factor, (gl.max(largest, 1) * factor).to(x_ptr.dtype.element_ty).to(gl.float32)


@gluon.jit
def _spread(rows, TOKENS: gl.constexpr, layout: gl.constexpr):
    """``[ROWS]`` as the first of ``[TOKENS, 1]`` in another layout, zeros behind."""
    ROWS: gl.constexpr = rows.shape[0]
    wide: gl.constexpr = gl.BlockedLayout([1, ROWS], [32, 1], [4, 1], [1, 0])
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, wide))[:, None]
    source = gl.arange(0, ROWS, gl.SliceLayout(0, wide))[None, :]
    rows = gl.convert_layout(rows, gl.SliceLayout(0, wide))[None, :]
    column = gl.sum(gl.where(token == source, rows, 0.0), 1)
    return gl.convert_layout(column, gl.SliceLayout(1, layout))[:, None]


@gluon.jit(do_not_specialize=["tokens", "experts"])
def normed_router_kernel(
    x_ptr, x_stride, residual_ptr, residual_stride, norm_ptr, eps, total_ptr, y_ptr, q_ptr, given_scale_ptr,
    q_scale_ptr, w_desc, partial_ptr, bias_ptr, scale, weights_ptr, ids_ptr, tokens, experts,
    HIDDEN: gl.constexpr, ROWS: gl.constexpr, X_LAYOUT: gl.constexpr, E_PAD: gl.constexpr, TERMS: gl.constexpr,
    SPLITS: gl.constexpr, POWER_S: gl.constexpr, AT_ONCE: gl.constexpr, TOP_K: gl.constexpr, POWER_K: gl.constexpr,
    SIGMOID: gl.constexpr, RENORMALISE: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """`few_tokens_kernel` with x = bf16 y, ``y = total / rms(total) * norm``, ``total = x + residual`` rounded.

    x, residual, total, y: ``[tokens, HIDDEN]`` bf16, tokens at most ROWS, 8 at most; q: e4m3 of y over q_scale, or
    None: fp32 ``[tokens]``, made here unless given_scale, fp32 of one element, is not None.
    """
    TOKENS: gl.constexpr = 8
    DEPTH: gl.constexpr = w_desc.block_type.shape[0]
    EXPERTS: gl.constexpr = w_desc.block_type.shape[1]
    BLOCK_K: gl.constexpr = w_desc.block_type.shape[2]
    E_TILES: gl.constexpr = E_PAD // EXPERTS
    x_bufs = gl.allocate_shared_memory(w_desc.dtype, [1, DEPTH, TOKENS, BLOCK_K], X_LAYOUT)
    w_bufs = gl.allocate_shared_memory(w_desc.dtype, [TERMS, DEPTH, EXPERTS, BLOCK_K], w_desc.layout)
    landed = new_barriers(1)
    launch_next()
    first_expert = gl.program_id(0) % E_TILES * EXPERTS
    split = gl.program_id(0) // E_TILES
    request_weights(w_desc, w_bufs, landed, first_expert, split, E_PAD)
    wait_for_last()

    SCALED: gl.constexpr = q_ptr is not None and given_scale_ptr is None
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))[:, None]
    first_col = split * (DEPTH * BLOCK_K) + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))[None, :]
    # This CTA's slice comes while the rows are read for their norm.
    totals = ()
    gains = ()
    for d in gl.static_range(DEPTH):
        col = first_col + d * BLOCK_K
        inside = (token < tokens) & (col < HIDDEN)
        total = gl.load(x_ptr + token * x_stride + col, mask=inside, other=0.0).to(gl.float32)
        total += gl.load(residual_ptr + token * residual_stride + col, mask=inside, other=0.0).to(gl.float32)
        totals = totals + (total.to(x_ptr.dtype.element_ty),)
        gains = gains + (gl.load(norm_ptr + col, mask=col < HIDDEN, other=0.0),)
    facts = _row_facts(
        x_ptr, residual_ptr, norm_ptr, (x_stride, residual_stride), tokens, eps, HIDDEN, ROWS, SCALED
    )  # fmt: skip
    factor = _spread(facts[0], TOKENS, layout)
    x_slice = x_bufs.index(0).reshape([DEPTH * TOKENS, BLOCK_K])
    rows = ()
    for d in gl.static_range(DEPTH):
        y = (totals[d].to(gl.float32) * factor * gains[d].to(gl.float32)).to(x_bufs.dtype)
        x_slice.slice(d * TOKENS, TOKENS).store(y)
        rows = rows + (y,)
    multiply_slice(x_bufs, w_bufs, landed, partial_ptr, first_expert, 0, tokens, split, tokens, E_PAD)

    # Others wait for the partial logits; what is stored here is for the next kernel.
    if first_expert == 0:
        q_scale = gl.full([TOKENS, 1], 1.0, gl.float32, layout)
        if SCALED:
            q_scale = gl.maximum(_spread(facts[1], TOKENS, layout) / 448.0, 1e-12)
            if split == 0:
                gl.store(q_scale_ptr + token, q_scale, mask=token < tokens)
        elif q_ptr is not None:
            q_scale += gl.load(given_scale_ptr) - 1.0
        for d in gl.static_range(DEPTH):
            col = first_col + d * BLOCK_K
            inside = (token < tokens) & (col < HIDDEN)
            place = token * HIDDEN + col
            gl.store(total_ptr + place, totals[d], mask=inside)
            gl.store(y_ptr + place, rows[d], mask=inside)
            if q_ptr is not None:
                q = gl.minimum(gl.maximum(rows[d].to(gl.float32) / q_scale, -448.0), 448.0)
                gl.store(q_ptr + place, q.to(q_ptr.dtype.element_ty), mask=inside)
    finish_few(
        partial_ptr, (bias_ptr, scale, weights_ptr, ids_ptr, experts), None, tokens,
        E_PAD, SPLITS, POWER_S, AT_ONCE, TOP_K, POWER_K, SIGMOID, RENORMALISE, SHARED, 0, 1, 1,
    )  # fmt: skip
