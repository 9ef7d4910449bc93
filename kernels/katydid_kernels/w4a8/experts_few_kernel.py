"""Routed experts of packed int4 for the fewest tokens: gate-up, SwiGLU, down and weighted sum in one launch.

Every (token, choice) pair is read for itself. A CTA has 16 rows of a weight at a time and all their columns, each of its
eight warps some of them, in registers: sums end in the CTA, and nothing is planned, cut or put together in memory but h.
The weights of its first down rows are on their way before it waits for h.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from katydid_kernels.gemm.ring import launch_next, wait_for_last
from katydid_kernels.w4a8.decode_order import wait_for
from katydid_kernels.w4a8.few_kernel import multiply_groups

__all__ = ["experts_few_w4a8_kernel"]


@gluon.constexpr_function
def _words_layout(groups, warps):
    return gl.BlockedLayout([groups, 2, 1, 4], [1, 1, 32, 1], [1, 1, warps, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def _scales_layout(groups, warps):
    return gl.BlockedLayout([groups, 1, 2], [1, 32, 1], [1, warps, 1], [2, 1, 0])


@gluon.jit
def _word_places(GROUPS: gl.constexpr, WARPS: gl.constexpr):
    """Of a thread's words: number of the group among its warp's, of the unit in it, thread, number in the unit."""
    layout: gl.constexpr = _words_layout(GROUPS, WARPS)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))[:, None, None, None]
    unit = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))[None, :, None, None]
    thread = gl.arange(0, WARPS * 32, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, None, None, :]
    return group, unit, thread[None, None, :, None], word


@gluon.jit
def _scale_places(GROUPS: gl.constexpr, WARPS: gl.constexpr):
    layout: gl.constexpr = _scales_layout(GROUPS, WARPS)
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    thread = gl.arange(0, WARPS * 32, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return group, thread, half


@gluon.jit
def _load_up(codes_ptr, scales_ptr, expert, block, strips, K: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr):
    """Rows ``16 * block`` on of an expert, groups dealt to the warps in turn."""
    group, unit, thread, word = _word_places(GROUPS, WARPS)
    strip = (expert * strips + block // 4).to(gl.int64)
    unit += (group * WARPS + thread // 32) * 2
    place = unit * 512 + block % 4 * 128 + thread % 32 * 4 + word
    codes = gl.load(codes_ptr + strip * (K // 64 * 512) + place, mask=unit < K // 64, other=0)
    group, thread, half = _scale_places(GROUPS, WARPS)
    group = group * WARPS + thread // 32
    place = group * 64 + block % 4 * 16 + half * 8 + thread % 32 // 4
    scale = gl.load(scales_ptr + strip * (K // 128 * 64) + place, mask=group < K // 128, other=0.0)
    return codes, scale.to(gl.float32)


@gluon.jit
def _load_down(
    codes_ptr, scales_ptr, weights_ptr, ids_ptr, experts, token, block, strips, WIDTH: gl.constexpr,
    TOP_K: gl.constexpr, PAIRS: gl.constexpr, WARPS: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """Rows ``16 * block`` on of all of a token's experts, which are dealt to the warps in turn; scales times the
    choice's weight."""
    first_expert, number = experts
    UNITS: gl.constexpr = (WIDTH + 63) // 64
    OF_ROW: gl.constexpr = (WIDTH + 127) // 128
    group, unit, thread, word = _word_places(PAIRS * EACH, WARPS)
    choice = group // EACH * WARPS + thread // 32
    expert = gl.load(ids_ptr + token * TOP_K + choice, mask=choice < TOP_K, other=-1) - first_expert
    local = (expert >= 0) & (expert < number) & (choice < TOP_K)
    unit += group % EACH * 2
    place = (expert.to(gl.int64) * strips + block // 4) * (UNITS * 512)
    place += unit * 512 + block % 4 * 128 + thread % 32 * 4 + word
    codes = gl.load(codes_ptr + place, mask=local & (unit < UNITS), other=0)
    group, thread, half = _scale_places(PAIRS * EACH, WARPS)
    choice = group // EACH * WARPS + thread // 32
    expert = gl.load(ids_ptr + token * TOP_K + choice, mask=choice < TOP_K, other=-1) - first_expert
    local = (expert >= 0) & (expert < number) & (choice < TOP_K) & (group % EACH < OF_ROW)
    place = (expert.to(gl.int64) * strips + block // 4) * OF_ROW + group % EACH
    place = place * 64 + block % 4 * 16 + half * 8 + thread % 32 // 4
    scale = gl.load(scales_ptr + place, mask=local, other=0.0).to(gl.float32)
    weight = gl.load(weights_ptr + token * TOP_K + choice, mask=local, other=0.0)
    return codes, scale * weight


@gluon.jit
def _of_rows(sums, WARPS: gl.constexpr):
    """The CTA's sums of all columns, ``[8, 4, 2, 2]``: row g, equal columns, half, equal columns."""
    first, _ = sums.permute((1, 2, 0)).split()
    return gl.sum(first.reshape([WARPS, 8, 4, 2, 2]), 0)


@gluon.jit(do_not_specialize=["tokens", "first_expert", "number"])
def experts_few_w4a8_kernel(
    x_ptr, x_stride, codes13_ptr, scales13_ptr, codes2_ptr, scales2_ptr, h_ptr, h_stride, weights_ptr, shared_ptr,
    out_ptr, ids_ptr, first_expert, number, ready_ptr, sync_ptr, x_scale_ptr, x_step, h_scale_ptr, tokens,
    H: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, WARPS: gl.constexpr, GROUPS: gl.constexpr,
    PAIRS: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """``out[t] = sum over j of weights[t, j] * w2[e] swiglu(w13[e] x[t]) + shared[t]``, e the expert of pair (t, j).

    x: int32 words of four e4m3, x_stride of them a row; codes: int32; h: e4m3 ``[pairs, *]``. GROUPS of 128 columns of x
    a warp, PAIRS of a token's experts a warp, EACH groups of h's columns, all powers of two. ready: zeros, an int32 a
    token; sync: a zero. Never more CTAs than fit the GPU at once.
    """
    launch_next()
    wait_for_last()
    experts = (first_expert, number)
    UP_BLOCKS: gl.constexpr = WIDTH // 8
    DOWN_BLOCKS: gl.constexpr = H // 16
    h_scale = gl.load(h_scale_ptr)
    for item in range(gl.program_id(0), tokens * (TOP_K * UP_BLOCKS), gl.num_programs(0)):
        pair = item // UP_BLOCKS
        block = item % UP_BLOCKS
        token = pair // TOP_K
        expert = gl.load(ids_ptr + pair) - first_expert
        if (expert >= 0) & (expert < number):
            codes, scale = _load_up(codes13_ptr, scales13_ptr, expert, block, WIDTH // 32, H, GROUPS, WARPS)
            group, unit, thread, word = _word_places(GROUPS, WARPS)
            column = ((group * WARPS + thread // 32) * 2 + unit) * 64 + word * 16 + thread % 4 * 4
            x = gl.load(x_ptr + token * x_stride + column // 4, mask=column < H, other=0)
            sums = multiply_groups(codes, scale, x, x, 1)
            gate, up = (_of_rows(sums, WARPS) * gl.load(x_scale_ptr + token * x_step)).permute((0, 1, 3, 2)).split()
            h = gate / (1.0 + gl.exp(-gate)) * (up / h_scale)
            h = gl.minimum(gl.maximum(h, -448.0), 448.0)
            layout: gl.constexpr = h.type.layout
            row = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
            same = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
            also = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
            target = h_ptr + pair * h_stride + block * 8 + row + 0 * same + 0 * also
            gl.store(target, h.to(gl.float8e4nv), mask=(same == 0) & (also == 0))
        gl.thread_barrier()
        gl.atomic_add(ready_ptr + token, 1, sem="release")

    for item in range(gl.program_id(0), tokens * DOWN_BLOCKS, gl.num_programs(0)):
        token = item // DOWN_BLOCKS
        block = item % DOWN_BLOCKS
        codes, scale = _load_down(
            codes2_ptr, scales2_ptr, weights_ptr, ids_ptr, experts, token, block, H // 64, WIDTH, TOP_K, PAIRS, WARPS,
            EACH,
        )  # fmt: skip
        wait_for(ready_ptr + token, TOP_K * UP_BLOCKS)
        group, unit, thread, word = _word_places(PAIRS * EACH, WARPS)
        choice = group // EACH * WARPS + thread // 32
        column = (group % EACH * 2 + unit) * 64 + word * 16 + thread % 4 * 4
        source = h_ptr.to(gl.pointer_type(gl.int32)) + ((token * TOP_K + choice) * h_stride + column) // 4
        x = gl.load(source, mask=(choice < TOP_K) & (column < WIDTH), other=0)
        y = _of_rows(multiply_groups(codes, scale, x, x, 1), WARPS) * h_scale
        layout: gl.constexpr = y.type.layout
        row = gl.arange(0, 8, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))[:, None, None, None]
        same = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))[None, :, None, None]
        half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))[None, None, :, None]
        also = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, None, None, :]
        place = token.to(gl.int64) * H + block * 16 + half * 8 + row + 0 * same + 0 * also
        first = (same == 0) & (also == 0)
        if shared_ptr is not None:
            y += gl.load(shared_ptr + place, mask=first, other=0.0).to(gl.float32)
        gl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=first)

    gl.thread_barrier()
    if gl.atomic_add(sync_ptr, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        for i in range(tokens):
            gl.store(ready_ptr + i, 0)
        gl.store(sync_ptr, 0)
