"""Routed experts of packed int4 for the fewest tokens: gate-up, SwiGLU, down and weighted sum in one launch.

Every (token, choice) pair is read for itself. A CTA has 16 rows of a weight at a time and all their columns, each of its
warps some of them, in registers: sums end in the CTA, and nothing is planned, cut or put together in memory but h. The
weights of the next rows, and of the first down rows, are on their way before these are multiplied.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from katydid_kernels.gemm.ring import launch_next, wait_for_last
from katydid_kernels.w4a8.decode_order import wait_for
from katydid_kernels.w4a8.few_kernel import group_sums, operand_words, row_sums, words_layout

__all__ = ["experts_few_w4a8_kernel"]


@gluon.constexpr_function
def _scales_layout(groups, warps):
    return gl.BlockedLayout([groups, 1, 2], [1, 32, 1], [1, warps, 1], [2, 1, 0])


@gluon.constexpr_function
def _chunks_layout(warps):
    return gl.BlockedLayout([1, 1, 4], [32, 1, 1], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def _word_places(GROUPS: gl.constexpr, WARPS: gl.constexpr):
    """Of a thread's words: number of the group among its warp's, of the unit in it, thread, number in the unit."""
    layout: gl.constexpr = words_layout(GROUPS, WARPS)
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
def _chunks(COUNT: gl.constexpr, WARPS: gl.constexpr):
    """Chunks of 16 columns, in the order `operand_words` takes them, and the words of each."""
    layout: gl.constexpr = _chunks_layout(WARPS)
    chunk = gl.arange(0, COUNT, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    return chunk, gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]


@gluon.jit
def _load_up(weight, ids_ptr, experts, item, items, HIDDEN: gl.constexpr, GROUPS: gl.constexpr, WARPS: gl.constexpr):
    """16 rows of a pair's w13, groups dealt to the warps in turn; zeros past the last item or of an expert that is not
    local."""
    codes_ptr, scales_ptr, strips = weight
    first_expert, number = experts
    expert = gl.load(ids_ptr + gl.minimum(item, items - 1) // (strips * 4)) - first_expert
    local = (item < items) & (expert >= 0) & (expert < number)
    block = item % (strips * 4)
    strip = (expert * strips + block // 4).to(gl.int64)
    group, unit, thread, word = _word_places(GROUPS, WARPS)
    unit += (group * WARPS + thread // 32) * 2
    place = unit * 512 + block % 4 * 128 + thread % 32 * 4 + word
    codes = gl.load(codes_ptr + strip * (HIDDEN // 64 * 512) + place, mask=local & (unit < HIDDEN // 64), other=0)
    group, thread, half = _scale_places(GROUPS, WARPS)
    group = group * WARPS + thread // 32
    place = group * 64 + block % 4 * 16 + half * 8 + thread % 32 // 4
    scales_ptr += strip * (HIDDEN // 128 * 64)
    return codes, gl.load(scales_ptr + place, mask=local & (group < HIDDEN // 128), other=0.0)


@gluon.jit
def _load_down(
    weight, weights_ptr, ids_ptr, experts, item, items, WIDTH: gl.constexpr, TOP_K: gl.constexpr,
    PAIRS: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """16 rows of w2 of all of a token's experts, which are dealt to the warps in turn; scales times the choice's
    weight."""
    codes_ptr, scales_ptr, strips = weight
    first_expert, number = experts
    UNITS: gl.constexpr = (WIDTH + 63) // 64
    OF_ROW: gl.constexpr = (WIDTH + 127) // 128
    token = gl.minimum(item, items - 1) // (strips * 4)
    block = item % (strips * 4)
    group, unit, thread, word = _word_places(PAIRS * EACH, WARPS)
    choice = group // EACH * WARPS + thread // 32
    expert = gl.load(ids_ptr + token * TOP_K + choice, mask=choice < TOP_K, other=-1) - first_expert
    local = (expert >= 0) & (expert < number) & (choice < TOP_K) & (item < items)
    unit += group % EACH * 2
    place = (expert.to(gl.int64) * strips + block // 4) * (UNITS * 512)
    place += unit * 512 + block % 4 * 128 + thread % 32 * 4 + word
    codes = gl.load(codes_ptr + place, mask=local & (unit < UNITS), other=0)
    group, thread, half = _scale_places(PAIRS * EACH, WARPS)
    choice = group // EACH * WARPS + thread // 32
    expert = gl.load(ids_ptr + token * TOP_K + choice, mask=choice < TOP_K, other=-1) - first_expert
    local = (expert >= 0) & (expert < number) & (choice < TOP_K) & (group % EACH < OF_ROW) & (item < items)
    place = (expert.to(gl.int64) * strips + block // 4) * OF_ROW + group % EACH
    place = place * 64 + block % 4 * 16 + half * 8 + thread % 32 // 4
    scale = gl.load(scales_ptr + place, mask=local, other=0.0).to(gl.float32)
    return codes, scale * gl.load(weights_ptr + token * TOP_K + choice, mask=local, other=0.0)


@gluon.jit
def _store_h(total, h_ptr, scale, h_scale, local):
    """Eight columns of h, of a row of gate and one of up each, from equal tokens."""
    gate, up = (total * scale).split()
    h = gate / (1.0 + gl.exp(-gate)) * (up / h_scale)
    h = gl.minimum(gl.maximum(h, -448.0), 448.0).to(gl.float8e4nv)
    layout: gl.constexpr = h.type.layout
    token = gl.arange(0, 8, gl.SliceLayout(1, layout))[:, None]
    place = gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :] + 0 * token
    gl.store(h_ptr + place, h, mask=(token == 0) & local)


@gluon.jit
def _store_y(total, out_ptr, shared_ptr, place):
    """16 columns of a token's result, from equal tokens."""
    layout: gl.constexpr = total.type.layout
    token = gl.arange(0, 8, gl.SliceLayout(1, layout))[:, None]
    place += gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :] + 0 * token
    if shared_ptr is not None:
        total += gl.load(shared_ptr + place, mask=token == 0, other=0.0).to(gl.float32)
    gl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=token == 0)


@gluon.jit(do_not_specialize=["tokens", "first_expert", "number"])
def experts_few_w4a8_kernel(
    x_ptr, x_stride, codes13_ptr, scales13_ptr, codes2_ptr, scales2_ptr, h_ptr, h_stride, weights_ptr, shared_ptr,
    out_ptr, ids_ptr, first_expert, number, ready_ptr, sync_ptr, x_scale_ptr, x_step, h_scale_ptr, tokens,
    H: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr, WARPS: gl.constexpr, GROUPS: gl.constexpr,
    PAIRS: gl.constexpr, EACH: gl.constexpr,
):  # fmt: skip
    """``out[t] = sum over j of weights[t, j] * w2[e] swiglu(w13[e] x[t]) + shared[t]``, e the expert of pair (t, j).

    x: int32 words of four e4m3, x_stride of them a row; codes: int32; h: words of e4m3 ``[pairs, h_stride]``. GROUPS of
    128 columns of x a warp, PAIRS of a token's experts a warp, EACH groups of h's columns, all powers of two. ready:
    zeros, an int32 a token; sync: a zero. Never more CTAs than fit the GPU at once.
    """
    launch_next()
    experts = (first_expert, number)
    w13 = (codes13_ptr, scales13_ptr, WIDTH // 32)
    w2 = (codes2_ptr, scales2_ptr, H // 64)
    UP: gl.constexpr = WIDTH // 8
    DOWN: gl.constexpr = H // 16
    UP_CHUNKS: gl.constexpr = GROUPS * WARPS * 8
    DOWN_CHUNKS: gl.constexpr = PAIRS * EACH * WARPS * 8
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    x_buffer = gl.allocate_shared_memory(gl.int64, [UP_CHUNKS, 1, 4], plain)
    h_buffer = gl.allocate_shared_memory(gl.int64, [DOWN_CHUNKS, 1, 4], plain)
    step = gl.num_programs(0)
    ups = tokens * (TOP_K * UP)
    downs = tokens * DOWN
    x_chunk, x_word = _chunks(UP_CHUNKS, WARPS)
    h_chunk, h_word = _chunks(DOWN_CHUNKS, WARPS)
    group = h_chunk // (WARPS * 8)
    choice = group // EACH * WARPS + h_chunk // 8 % WARPS
    h_column = group % EACH * 32 + h_chunk % 8 * 4
    h_place = choice * h_stride + h_column + h_word
    wait_for_last()
    codes, scale = _load_up(w13, ids_ptr, experts, gl.program_id(0), ups, H, GROUPS, WARPS)
    down_codes, down_scale = _load_down(
        w2, weights_ptr, ids_ptr, experts, gl.program_id(0), downs, WIDTH, TOP_K, PAIRS, EACH, WARPS
    )  # fmt: skip
    h_scale = gl.load(h_scale_ptr)
    for item in range(gl.program_id(0), ups, step):
        pair = item // UP
        token = pair // TOP_K
        words = gl.load(x_ptr + token * x_stride + x_chunk * 4 + x_word, mask=x_chunk * 16 < H, other=0)
        expert = gl.load(ids_ptr + pair) - first_expert
        x_scale = gl.load(x_scale_ptr + token * x_step)
        next_codes, next_scale = _load_up(w13, ids_ptr, experts, item + step, ups, H, GROUPS, WARPS)
        x = operand_words(words, x_buffer, GROUPS, WARPS)
        total = row_sums(group_sums(codes, x, scale.to(gl.float32)), WARPS, True)
        local = (expert >= 0) & (expert < number)
        _store_h(total, h_ptr + (pair * h_stride * 4 + item % UP * 8), x_scale, h_scale, local)
        gl.thread_barrier()
        gl.atomic_add(ready_ptr + token, 1, sem="release")
        codes = next_codes
        scale = next_scale

    h_words = h_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    for item in range(gl.program_id(0), downs, step):
        token = item // DOWN
        wait_for(ready_ptr + token, TOP_K * UP)
        source = h_words + token * TOP_K * h_stride + h_place
        words = gl.load(source, mask=(choice < TOP_K) & (h_column < WIDTH // 4), other=0)
        next_codes, next_scale = _load_down(
            w2, weights_ptr, ids_ptr, experts, item + step, downs, WIDTH, TOP_K, PAIRS, EACH, WARPS
        )  # fmt: skip
        h = operand_words(words, h_buffer, PAIRS * EACH, WARPS)
        total = row_sums(group_sums(down_codes, h, down_scale), WARPS) * h_scale
        _store_y(total, out_ptr, shared_ptr, token.to(gl.int64) * H + item % DOWN * 16)
        down_codes = next_codes
        down_scale = next_scale

    gl.thread_barrier()
    if gl.atomic_add(sync_ptr, 1, sem="acq_rel") == step - 1:
        for i in range(tokens):
            gl.store(ready_ptr + i, 0)
        gl.store(sync_ptr, 0)
