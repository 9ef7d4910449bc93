"""One launch of two kinds of programs: heads of q and k of one token, and tiles of V on their way to be transposed.

A tile of q or k holds whole heads as their two halves, which RoPE turns into each other. The norm's factor is one
number a head and all that follows is linear, so it is left out of the elements and applied to what is stored: with the
norm before RoPE its weight is folded into cosine and sine, and e4m3 q needs no factor at all, only its scale does.
V pages are token-contiguous: a tile of many tokens is turned in shared memory so that a warp writes along a row.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["qkv_post_kernel"]


@triton.jit
def _coefficients(table_row, weight_ptr, half, HALF: tl.constexpr, NORM: tl.constexpr):
    """What the halves (x1, x2) are multiplied by: ``r1 = x1 c1 - x2 s2, r2 = x2 c2 + x1 s1``."""
    cos = tl.load(table_row + half)
    sin = tl.load(table_row + HALF + half)
    if NORM == "before_rope":
        first = tl.load(weight_ptr + half).to(tl.float32)
        second = tl.load(weight_ptr + HALF + half).to(tl.float32)
        return cos * first, sin * second, cos * second, sin * first
    return cos, sin, cos, sin


@triton.jit
def _butterfly(x, ROWS: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr):
    """One stage of the fast Walsh-Hadamard transform: elements STEP apart become their sum and difference."""
    pairs = tl.permute(tl.reshape(x, (ROWS, N // (2 * STEP), 2, STEP)), (0, 1, 3, 2))
    low, high = tl.split(pairs)
    pairs = tl.join(low + high, low - high)
    return tl.reshape(tl.permute(pairs, (0, 1, 3, 2)), (ROWS, N))


@triton.jit
def _hadamard(r1, r2, ROWS: tl.constexpr, HALF: tl.constexpr):
    """The heads times the orthonormal Hadamard matrix of their width, in Sylvester's order."""
    factor = (2 * HALF) ** -0.5
    low = (r1 + r2) * factor
    high = (r1 - r2) * factor
    for i in tl.static_range(8):
        if (1 << i) < HALF:
            low = _butterfly(low, ROWS, HALF, 1 << i)
            high = _butterfly(high, ROWS, HALF, 1 << i)
    return low, high


@triton.jit
def _load_heads(
    source, group, end_group, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr
):
    """Both halves of a group of the q or k heads of the token at `source`, as they are stored; none past the end."""
    HALF: tl.constexpr = D // 2
    Q_GROUPS: tl.constexpr = (Q_HEADS + ROWS - 1) // ROWS
    first = tl.where(group < Q_GROUPS, group * ROWS, Q_HEADS + (group - Q_GROUPS) * ROWS)
    first = tl.where(group < end_group, first, Q_HEADS + KV_HEADS)
    head = first + tl.arange(0, ROWS)[:, None]
    place = source + head * D + tl.arange(0, HALF)[None, :]
    inside = head < Q_HEADS + KV_HEADS
    return tl.load(place, mask=inside, other=0.0), tl.load(place + HALF, mask=inside, other=0.0)


@triton.jit
def _load_mean(k_mean_ptr, group, KV_HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """Both halves of what is taken off a group of k heads; nothing before the first."""
    HALF: tl.constexpr = D // 2
    head = group * ROWS + tl.arange(0, ROWS)[:, None]
    place = k_mean_ptr + head * D + tl.arange(0, HALF)[None, :]
    inside = (head >= 0) & (head < KV_HEADS)
    return tl.load(place, mask=inside, other=0.0), tl.load(place + HALF, mask=inside, other=0.0)


@triton.jit
def _rotated(
    x1, x2, half, coefficients, weight_ptr, eps,
    ROWS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, HADAMARD: tl.constexpr,
):  # fmt: skip
    """Both halves of normed and rotated heads but for the factor a head, and that factor."""
    c1, s2, c2, s1 = coefficients
    x1 = x1.to(tl.float32)
    x2 = x2.to(tl.float32)
    r1 = x1 * c1[None, :] - x2 * s2[None, :]
    r2 = x2 * c2[None, :] + x1 * s1[None, :]
    factor = tl.full([ROWS], 1.0, tl.float32)
    if NORM != "none":
        # A rotation keeps the norm, so both orders take it from what was read.
        factor = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / (2 * HALF) + eps)
    if NORM == "after_rope":
        r1 *= tl.load(weight_ptr + half).to(tl.float32)[None, :]
        r2 *= tl.load(weight_ptr + HALF + half).to(tl.float32)[None, :]
    if HADAMARD:
        r1, r2 = _hadamard(r1, r2, ROWS, HALF)
    return r1, r2, factor


@triton.jit
def _saturated(x, dtype: tl.constexpr):
    # e4m3 has no infinity: what exceeds its range must be clamped or it becomes NaN.
    if dtype.primitive_bitwidth == 8:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    return x.to(dtype)


@triton.jit
def _store_q(
    r1, r2, factor, token, head, inside, half, q_ptr, q_scale_ptr, q_scales_ptr,
    Q_HEADS: tl.constexpr, D: tl.constexpr, Q_SCALE: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    if Q_SCALE == "dynamic":
        largest = tl.maximum(tl.max(tl.abs(r1), 1), tl.max(tl.abs(r2), 1))
        scale = tl.maximum(largest * factor / 448.0, 1e-12)
        tl.store(q_scales_ptr + token * Q_HEADS + head, scale, mask=inside)
        factor = factor / scale
    elif Q_SCALE == "static":
        scale = tl.load(q_scale_ptr)
        tl.store(q_scales_ptr + token * Q_HEADS + head, tl.zeros_like(factor) + scale, mask=inside)
        factor = factor / scale
    target = q_ptr + token.to(tl.int64) * (Q_HEADS * D) + head[:, None] * D + half[None, :]
    tl.store(target, _saturated(r1 * factor[:, None], dtype), mask=inside[:, None])
    tl.store(target + HALF, _saturated(r2 * factor[:, None], dtype), mask=inside[:, None])


@triton.jit
def _store_v(
    item, qkv_ptr, qkv_stride, slots_ptr, v_pages_ptr, v_scale_ptr, v_scale_step, tokens,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, V_TOKENS: tl.constexpr,
    V_COLUMNS: tl.constexpr,
):  # fmt: skip
    """V_COLUMNS of one head of V of V_TOKENS tokens into their pages."""
    PARTS: tl.constexpr = D // V_COLUMNS
    head = item // PARTS % KV_HEADS
    token = item // (PARTS * KV_HEADS) * V_TOKENS + tl.arange(0, V_TOKENS)
    d = item % PARTS * V_COLUMNS + tl.arange(0, V_COLUMNS)
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1)
    source = qkv_ptr + token.to(tl.int64)[:, None] * qkv_stride + (Q_HEADS + KV_HEADS + head) * D + d[None, :]
    value = tl.load(source, mask=(slot >= 0)[:, None], other=0.0)
    if v_scale_ptr is not None:
        value = value.to(tl.float32) / tl.load(v_scale_ptr + head * v_scale_step)
    value = _saturated(value, v_pages_ptr.dtype.element_ty)
    row = (slot // PAGE).to(tl.int64) * KV_HEADS + head
    # Of addresses it knows nothing about, the compiler gives a warp those along the first dimension: 32 tokens.
    target = v_pages_ptr + (row * (D * PAGE) + slot % PAGE)[:, None] + (d * PAGE)[None, :]
    tl.store(target, value, mask=(slot >= 0)[:, None])


@triton.jit(do_not_specialize=["tokens"])
def qkv_post_kernel(
    qkv_ptr, qkv_stride, table_ptr, positions_ptr, slots_ptr, q_weight_ptr, k_weight_ptr, q_ptr, q_scale_ptr,
    q_scales_ptr, k_pages_ptr, v_pages_ptr, k_scale_ptr, k_scale_step, v_scale_ptr, v_scale_step, k_mean_ptr, tokens,
    eps, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, NORM: tl.constexpr,
    HADAMARD: tl.constexpr, Q_SCALE: tl.constexpr, ROWS: tl.constexpr, LOOP: tl.constexpr, V_TOKENS: tl.constexpr,
    V_COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """For each token programs of LOOP groups of ROWS heads of q and of k, then programs of V_COLUMNS of a head of V of
    V_TOKENS tokens each. EARLY: launched while the kernel that makes qkv runs.
    """
    HALF: tl.constexpr = D // 2
    Q_GROUPS: tl.constexpr = (Q_HEADS + ROWS - 1) // ROWS
    GROUPS: tl.constexpr = Q_GROUPS + (KV_HEADS + ROWS - 1) // ROWS
    PARTS: tl.constexpr = (GROUPS + LOOP - 1) // LOOP
    # The long programs first: those of V then fill the GPU while the last of them end.
    qk_programs = tokens * PARTS
    item = tl.program_id(0)
    if EARLY:
        gdc_launch_dependents()
    if item >= qk_programs:
        if EARLY:
            gdc_wait()
        _store_v(
            item - qk_programs, qkv_ptr, qkv_stride, slots_ptr, v_pages_ptr, v_scale_ptr, v_scale_step, tokens,
            Q_HEADS, KV_HEADS, D, PAGE, V_TOKENS, V_COLUMNS,
        )  # fmt: skip
    else:
        token = item // PARTS
        first_group = item % PARTS * LOOP
        end_group = tl.minimum(first_group + LOOP, GROUPS)
        half = tl.arange(0, HALF)
        row = tl.arange(0, ROWS)
        source = qkv_ptr + token.to(tl.int64) * qkv_stride
        # Of few tokens, what depends on the position alone is computed while they wait, and means of keys are fetched;
        # of many, whose wait is over, it is while their first heads are on the way, and means are in the L1.
        if LOOP > 1:
            if EARLY:
                gdc_wait()
            x1, x2 = _load_heads(source, first_group, end_group, Q_HEADS, KV_HEADS, D, ROWS)
        table_row = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * D
        q_coefficients = _coefficients(table_row, q_weight_ptr, half, HALF, NORM)
        if LOOP == 1:
            if k_mean_ptr is not None:
                mean1, mean2 = _load_mean(k_mean_ptr, first_group - Q_GROUPS, KV_HEADS, D, ROWS)
            if EARLY:
                gdc_wait()
            x1, x2 = _load_heads(source, first_group, end_group, Q_HEADS, KV_HEADS, D, ROWS)
        # The next group is loaded before this one is stored: no load may pass a store.
        for group in range(first_group, tl.minimum(end_group, Q_GROUPS)):
            next1, next2 = _load_heads(source, group + 1, end_group, Q_HEADS, KV_HEADS, D, ROWS)
            head = group * ROWS + row
            r1, r2, factor = _rotated(x1, x2, half, q_coefficients, q_weight_ptr, eps, ROWS, HALF, NORM, HADAMARD)
            _store_q(
                r1, r2, factor, token, head, head < Q_HEADS, half, q_ptr, q_scale_ptr, q_scales_ptr,
                Q_HEADS, D, Q_SCALE,
            )  # fmt: skip
            x1 = next1
            x2 = next2
        if end_group > Q_GROUPS:
            slot = tl.load(slots_ptr + token)
            k_coefficients = _coefficients(table_row, k_weight_ptr, half, HALF, NORM)
            for group in range(tl.maximum(first_group, Q_GROUPS), end_group):
                next1, next2 = _load_heads(source, group + 1, end_group, Q_HEADS, KV_HEADS, D, ROWS)
                head = (group - Q_GROUPS) * ROWS + row
                inside = (head < KV_HEADS) & (slot >= 0)
                r1, r2, factor = _rotated(x1, x2, half, k_coefficients, k_weight_ptr, eps, ROWS, HALF, NORM, HADAMARD)
                if k_mean_ptr is not None:
                    if LOOP == 1:
                        r1 = r1 * factor[:, None] - mean1
                        r2 = r2 * factor[:, None] - mean2
                    else:
                        mean = k_mean_ptr + head[:, None] * D + half[None, :]
                        r1 = r1 * factor[:, None] - tl.load(mean, mask=inside[:, None], other=0.0)
                        r2 = r2 * factor[:, None] - tl.load(mean + HALF, mask=inside[:, None], other=0.0)
                    factor = tl.full([ROWS], 1.0, tl.float32)
                if k_scale_ptr is not None:
                    factor /= tl.load(k_scale_ptr + head * k_scale_step, mask=inside, other=1.0)
                page_row = ((slot // PAGE).to(tl.int64) * KV_HEADS + head) * PAGE + slot % PAGE
                target = k_pages_ptr + page_row[:, None] * D + half[None, :]
                dtype: tl.constexpr = k_pages_ptr.dtype.element_ty
                tl.store(target, _saturated(r1 * factor[:, None], dtype), mask=inside[:, None])
                tl.store(target + HALF, _saturated(r2 * factor[:, None], dtype), mask=inside[:, None])
                x1 = next1
                x2 = next2
