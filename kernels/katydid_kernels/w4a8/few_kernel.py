"""y = x W^T for one or two rows of x and packed int4 W: whole rows of W in one CTA's registers, nothing to meet for.

For so few rows what counts is the way from one kernel to the next. A CTA has 16 rows of W, each warp some of their
groups of 128 columns, loaded before the kernel ahead has ended (PDL). x then goes through shared memory, into the order
the tensor cores take it, and the warps' sums are added up there: no ring, no partial sums in memory. x may come in 16
bits and is then quantised by every CTA for itself, as `quantize_fp8` does, which takes less than another launch.

The packed order is that of the operand of ``mma.m16n8k16`` too, up to the order of columns, which is free as long as x
has the same: 1024 + u is a number in fp16 whose last bits are u, so a mask, an exclusive or and a subtraction make two
codes two exact numbers. x in e4m3 is exact in fp16 as well, and the sums are fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from katydid_kernels.gemm.ring import launch_next, wait_for_last

__all__ = ["few_w4a8_kernel"]


def _group_text() -> str:
    """Four sums of a group of 128 columns: of eight words of codes, and of as many of x in fp16. The other four results
    are zero."""
    lines = [
        ".reg .b32 a<4>, w, bias, low, high;",
        ".reg .f32 c<4>;",
        "mov.b32 bias, 0x64086408;",
        *(f"mov.f32 c{i}, 0f00000000;" for i in range(4)),
    ]
    for word in range(8):
        lines.append(f"lop3.b32 a0, ${8 + word}, 0x000f000f, 0x64086408, 0x6a;")
        for part in range(1, 4):
            lines.append(f"shr.u32 w, ${8 + word}, {4 * part};")
            lines.append(f"lop3.b32 a{part}, w, 0x000f000f, 0x64086408, 0x6a;")
        lines += [f"sub.rn.f16x2 a{part}, a{part}, bias;" for part in range(4)]
        lines.append(f"mov.b64 {{low, high}}, ${16 + word};")
        lines.append(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{c0, c1, c2, c3}, {a0, a1, a2, a3}, {low, high}, {c0, c1, c2, c3};"
        )
    lines += [f"mov.f32 ${i}, c{i};" for i in range(4)] + [f"mov.f32 ${i}, 0f00000000;" for i in range(4, 8)]
    return "{\n" + "\n".join(lines) + "\n}"


_GROUP_TEXT = gl.constexpr(_group_text())
_GROUP_REGISTERS = gl.constexpr(",".join(["=&f"] * 8 + ["r"] * 8 + ["l"] * 8))


@gluon.constexpr_function
def _words_layout(groups, warps):
    """Of a thread's words of codes or of x, ``[groups, 2, threads, 4]``: its groups' units of 64 columns."""
    return gl.BlockedLayout([groups, 2, 1, 4], [1, 1, 32, 1], [1, 1, warps, 1], [3, 2, 1, 0])


@gluon.jit
def _group_sums(codes, x, scale):
    """Sums ``[threads, 4]``, of two rows of W by two tokens each, over a thread's groups: of words of codes, of x as
    `_operand_words` loads it, and of scales ``[groups, threads, 2]``, one a row."""
    sums = gl.inline_asm_elementwise(_GROUP_TEXT, _GROUP_REGISTERS, [codes, x], gl.float32, is_pure=True, pack=8)
    scale = gl.join(scale, scale).reshape([scale.shape[0], scale.shape[1], 4])
    sums *= gl.convert_layout(scale, gl.SliceLayout(1, sums.type.layout), assert_trivial=True).expand_dims(1)
    return gl.sum(gl.sum(sums, 0), 0)


@gluon.jit
def _halves(words):
    """Four e4m3 as fp16, in the order of `unpack`'s: the first and the third, then the others."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 x, p, q;
        .reg .b16 low, high;
        prmt.b32 x, $1, 0, 0x3120;
        mov.b32 {low, high}, x;
        cvt.rn.f16x2.e4m3x2 p, low;
        cvt.rn.f16x2.e4m3x2 q, high;
        mov.b64 $0, {p, q};
        }
        """,
        "=l,r",
        [words],
        gl.int64,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _operand_words(words, buffer, GROUPS: gl.constexpr, WARPS: gl.constexpr):
    """What a thread multiplies, ``[GROUPS, 2, threads, 4]``: fewer rows than eight come again and again.

    words: of four e4m3, ``[chunks of 16 columns, rows, 4]``; buffer: int64 of the same shape.
    """
    ROWS: gl.constexpr = buffer.type.shape[1]
    # Group, warp, unit, chunk of it, copy of the rows, row, word.
    layout: gl.constexpr = gl.BlockedLayout(
        [GROUPS, 1, 2, 4, 1, 1, 1], [1, 1, 1, 1, 8 // ROWS, ROWS, 4], [1, WARPS, 1, 1, 1, 1, 1], [6, 5, 4, 3, 2, 1, 0]
    )
    buffer.store(_halves(words))
    gl.thread_barrier()
    x = buffer.reshape([GROUPS, WARPS, 2, 4, ROWS, 4]).load(gl.SliceLayout(4, layout)).expand_dims(4)
    x = x + gl.zeros([GROUPS, WARPS, 2, 4, 8 // ROWS, ROWS, 4], gl.int64, layout)
    x = x.permute((0, 2, 1, 4, 5, 6, 3)).reshape([GROUPS, 2, WARPS * 32, 4])
    return gl.convert_layout(x, _words_layout(GROUPS, WARPS), assert_trivial=True)


@gluon.jit
def _row_sums(sums, WARPS: gl.constexpr):
    """The CTA's ``[8 tokens, 16 rows]`` of its threads' sums."""
    # Warp, g, q, half, e -> token 2 * q + e and row 8 * half + g.
    parts = sums.reshape([WARPS, 8, 4, 2, 2]).permute((0, 2, 4, 3, 1))
    # Each warp adds all up for itself.
    layout: gl.constexpr = gl.BlockedLayout([WARPS, 4], [1, 32], [1, WARPS], [1, 0])
    total = gl.sum(gl.convert_layout(parts.reshape([WARPS, 128]), layout), 0)
    return total.reshape([8, 16])


@gluon.jit
def _largest(words):
    """The larger magnitude of each half of four bf16, as two bf16."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high;
        mov.b64 {low, high}, $1;
        and.b32 low, low, 0x7fff7fff;
        and.b32 high, high, 0x7fff7fff;
        max.u16x2 $0, low, high;
        }
        """,
        "=r,l",
        [words],
        gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _rounded(words, inverse):
    """Four bf16 times `inverse` as four e4m3."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 low, high, a, b;
        .reg .b16 p, q;
        .reg .f32 x0, x1, x2, x3;
        mov.b64 {low, high}, $1;
        shl.b32 a, low, 16;
        and.b32 b, low, 0xffff0000;
        mul.f32 x0, a, $2;
        mul.f32 x1, b, $2;
        shl.b32 a, high, 16;
        and.b32 b, high, 0xffff0000;
        mul.f32 x2, a, $2;
        mul.f32 x3, b, $2;
        cvt.rn.satfinite.e4m3x2.f32 p, x1, x0;
        cvt.rn.satfinite.e4m3x2.f32 q, x3, x2;
        mov.b32 $0, {p, q};
        }
        """,
        "=r,l,f",
        [words, inverse],
        gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit(do_not_specialize=["M", "N", "K", "x_step"])
def few_w4a8_kernel(
    x_ptr, x_stride, x_scale_ptr, x_step, codes_ptr, scales_ptr, bias_ptr, residual_ptr, residual_stride,
    out_ptr, out_stride, M, N, K,
    WARPS: gl.constexpr, GROUPS: gl.constexpr, ROWS: gl.constexpr, QUANTISE: gl.constexpr,
):  # fmt: skip
    """``out = (X[M, K] W[N, K]^T) * x_scale + bias + residual``; a CTA has rows ``16 * program_id`` on.

    x: words of four columns, int32 of e4m3 or, with QUANTISE, int64 of bf16, x_stride of them a row; codes: int32.
    K: a multiple of 16. GROUPS of 128 columns a warp and ROWS of x, powers of two.
    """
    THREADS: gl.constexpr = WARPS * 32
    layout: gl.constexpr = _words_layout(GROUPS, WARPS)
    launch_next()
    strip = gl.program_id(0) // 4
    quarter = gl.program_id(0) % 4
    units = gl.cdiv(K, 64)
    groups = gl.cdiv(K, 128)
    thread = gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))[None, None, :, None]
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))[:, None, None, None]
    unit = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))[None, :, None, None]
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, None, None, :]
    unit += (group * WARPS + thread // 32) * 2
    place = (strip * units + unit) * 512 + quarter * 128 + thread % 32 * 4 + word
    codes = gl.load(codes_ptr + place, mask=unit < units, other=0)

    # A thread has sums of two rows of W, one behind the other.
    by_row: gl.constexpr = gl.BlockedLayout([GROUPS, 1, 2], [1, 32, 1], [1, WARPS, 1], [2, 1, 0])
    lane = gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(2, by_row)))[None, :, None]
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, by_row)))[None, None, :]
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, by_row)))[:, None, None] * WARPS + lane // 32
    place = (strip * groups + group) * 64 + quarter * 16 + half * 8 + lane % 32 // 4
    scale = gl.load(scales_ptr + place, mask=group < groups, other=0.0).to(gl.float32)

    CHUNKS: gl.constexpr = GROUPS * WARPS * 8
    of_x: gl.constexpr = gl.BlockedLayout([1, 1, 4], [32 // ROWS, ROWS, 1], [WARPS, 1, 1], [2, 1, 0])
    chunk = gl.arange(0, CHUNKS, gl.SliceLayout(1, gl.SliceLayout(2, of_x)))[:, None, None]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, of_x)))[None, :, None]
    column = chunk * 4 + gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, of_x)))[None, None, :]
    buffer = gl.allocate_shared_memory(
        gl.int64, [CHUNKS, ROWS, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )  # fmt: skip
    store: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [1, WARPS], [1, 0])
    token = gl.arange(0, 8, gl.SliceLayout(1, store))
    wait_for_last()
    words = gl.load(x_ptr + row * x_stride + column, mask=(row < M) & (chunk * 16 < K), other=0)
    if QUANTISE:
        largest = _largest(words)
        largest = gl.maximum(largest & 0xFFFF, (largest >> 16) & 0xFFFF)
        largest = gl.max(gl.max(largest, 2), 0)
        row_scale = gl.maximum((largest << 16).to(gl.float32, bitcast=True) / 448.0, 1e-12)
        wide = (1.0 / row_scale)[None, :, None] + gl.zeros([CHUNKS, ROWS, 4], gl.float32, of_x)
        words = _rounded(words, wide)
        copies: gl.constexpr = gl.BlockedLayout([1, 1], [8 // ROWS, 4 * ROWS], [1, WARPS], [1, 0])
        factor = gl.convert_layout(row_scale, gl.SliceLayout(0, copies))[None, :]
        factor += gl.zeros([8 // ROWS, ROWS], gl.float32, copies)
        factor = gl.convert_layout(factor.reshape([8]), gl.SliceLayout(1, store))
    else:
        factor = gl.load(x_scale_ptr + token * x_step, mask=token < M, other=0.0)
    x = _operand_words(words, buffer, GROUPS, WARPS)
    total = gl.convert_layout(_row_sums(_group_sums(codes, x, scale), WARPS), store, assert_trivial=True)
    total *= factor[:, None]
    row = gl.program_id(0) * 16 + gl.arange(0, 16, gl.SliceLayout(0, store))
    if bias_ptr is not None:
        total += gl.load(bias_ptr + row, mask=row < N, other=0.0).to(gl.float32)[None, :]
    there = (token < M)[:, None] & (row < N)[None, :]
    if residual_ptr is not None:
        source = residual_ptr + token[:, None] * residual_stride + row[None, :]
        total += gl.load(source, mask=there, other=0.0).to(gl.float32)
    gl.store(out_ptr + token[:, None] * out_stride + row[None, :], total.to(out_ptr.dtype.element_ty), mask=there)
