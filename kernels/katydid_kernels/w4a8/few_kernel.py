"""y = x W^T for up to 16 rows of x and packed int4 W, with nothing to meet for: whole rows of W in one CTA's registers.

For so few rows what counts is the way from one kernel to the next. A CTA has 16 rows of W, each warp some of their
groups of 128 columns, loaded before the kernel ahead has ended (PDL). It then reads x, multiplies on the tensor cores
and adds its warps' sums up in shared memory: no ring, no partial sums in memory. x may come in 16 bits and is then
quantised by every CTA for itself, as `quantize_fp8` does, which takes less than another launch.

The packed order is that of the operand of ``mma.m16n8k16`` too, up to the order of columns, which is free as long as x
has the same: 1024 + u is a number in fp16 whose last bits are u, so a mask, an exclusive or and a subtraction make two
codes two exact numbers. x in e4m3 is exact in fp16 as well, and the sums are fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from katydid_kernels.gemm.ring import launch_next, wait_for_last

__all__ = ["few_w4a8_kernel", "multiply_groups"]


def _product_text(blocks: int) -> str:
    """One group of 128 columns: eight words of codes, and of e4m3 for each of `blocks` times eight tokens, to the four
    sums a thread has of each; the other four results are zero."""
    lines = [
        ".reg .b32 a<4>, w, x, b<2>;",
        ".reg .b16 low, high;",
        ".reg .f32 c<8>;",
        *(f"mov.f32 c{i}, 0f00000000;" for i in range(8)),
    ]
    for word in range(8):
        lines.append(f"lop3.b32 a0, ${8 + word}, 0x000f000f, 0x64086408, 0x6a;")
        for part in range(1, 4):
            lines.append(f"shr.u32 w, ${8 + word}, {4 * part};")
            lines.append(f"lop3.b32 a{part}, w, 0x000f000f, 0x64086408, 0x6a;")
        lines.append("mov.b32 w, 0x64086408;")
        lines += [f"sub.rn.f16x2 a{part}, a{part}, w;" for part in range(4)]
        for block in range(blocks):
            c = ", ".join(f"c{4 * block + i}" for i in range(4))
            lines += [
                f"prmt.b32 x, ${16 + 8 * block + word}, 0, 0x3120;",
                "mov.b32 {low, high}, x;",
                "cvt.rn.f16x2.e4m3x2 b0, low;",
                "cvt.rn.f16x2.e4m3x2 b1, high;",
                f"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{c}}}, {{a0, a1, a2, a3}}, {{b0, b1}}, {{{c}}};",
            ]
    lines += [f"mov.f32 ${i}, c{i};" for i in range(8)]
    return "{\n" + "\n".join(lines) + "\n}"


def _constraints(blocks: int) -> str:
    return ",".join(["=&f"] * 8 + ["r"] * (8 + 8 * blocks))


_PRODUCT = [gl.constexpr(_product_text(blocks)) for blocks in (1, 2)]
_REGISTERS = [gl.constexpr(_constraints(blocks)) for blocks in (1, 2)]
_PRODUCT_1, _PRODUCT_2 = _PRODUCT
_REGISTERS_1, _REGISTERS_2 = _REGISTERS


@gluon.jit
def _product(codes, x, other, BLOCKS: gl.constexpr):
    if BLOCKS == 1:
        sums = gl.inline_asm_elementwise(_PRODUCT_1, _REGISTERS_1, [codes, x], gl.float32, is_pure=True, pack=8)
    else:
        sums = gl.inline_asm_elementwise(_PRODUCT_2, _REGISTERS_2, [codes, x, other], gl.float32, is_pure=True, pack=8)
    return sums


@gluon.jit
def multiply_groups(codes, scale, words, other, BLOCKS: gl.constexpr):
    """Sums ``[2, threads, 4]`` of eight and other eight tokens: words of codes ``[groups, 2, threads, 4]``, of their
    scales ``[groups, threads, 2]``, one for each of the two rows a thread has, and of x."""
    sums = _product(codes, words, other, BLOCKS)
    scale = gl.join(scale, scale).reshape([scale.shape[0], scale.shape[1], 4])
    sums *= gl.convert_layout(scale, gl.SliceLayout(1, sums.type.layout)).expand_dims(1)
    return gl.sum(sums, 0)


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


@gluon.jit
def _words(x_ptr, x_stride, first, column, M, K):
    """The words of four columns of x's rows that a thread multiplies; zeros where there is none."""
    layout: gl.constexpr = column.type.layout
    thread = gl.arange(0, column.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    row = (first + thread % 32 // 4)[None, None, :, None]
    return gl.load(x_ptr + row * x_stride + column // 4, mask=(row < M) & (column < K), other=0)


@gluon.jit(do_not_specialize=["M", "N", "K", "x_step"])
def few_w4a8_kernel(
    x_ptr, x_stride, x_scale_ptr, x_step, codes_ptr, scales_ptr, bias_ptr, residual_ptr, residual_stride,
    out_ptr, out_stride, M, N, K,
    WARPS: gl.constexpr, GROUPS: gl.constexpr, BLOCKS: gl.constexpr, QUANTISE: gl.constexpr,
):  # fmt: skip
    """``out = (X[M, K] W[N, K]^T) * x_scale + bias + residual``; a CTA has rows ``16 * program_id`` on.

    x: words of four columns, int32 of e4m3 or, with QUANTISE, int64 of bf16, x_stride of them a row; codes: int32.
    GROUPS: of 128 columns a warp, a power of two.
    """
    THREADS: gl.constexpr = WARPS * 32
    layout: gl.constexpr = gl.BlockedLayout([GROUPS, 2, 1, 4], [1, 1, 32, 1], [1, 1, WARPS, 1], [3, 2, 1, 0])
    of_thread: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout)))
    of_group: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    of_unit: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    of_word: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    launch_next()
    strip = gl.program_id(0) // 4
    quarter = gl.program_id(0) % 4
    units = gl.cdiv(K, 64)
    groups = gl.cdiv(K, 128)
    thread = gl.arange(0, THREADS, of_thread)[None, None, :, None]
    group = gl.arange(0, GROUPS, of_group)[:, None, None, None] * WARPS + thread // 32
    unit = group * 2 + gl.arange(0, 2, of_unit)[None, :, None, None]
    word = gl.arange(0, 4, of_word)[None, None, None, :]
    place = (strip * units + unit) * 512 + quarter * 128 + thread % 32 * 4 + word
    codes = gl.load(codes_ptr + place, mask=unit < units, other=0)

    # A thread has sums of two rows of W, one behind the other.
    by_row: gl.constexpr = gl.BlockedLayout([GROUPS, 1, 2], [1, 32, 1], [1, WARPS, 1], [2, 1, 0])
    lane = gl.arange(0, THREADS, gl.SliceLayout(0, gl.SliceLayout(2, by_row)))[None, :, None]
    half = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, by_row)))[None, None, :]
    scaled = gl.arange(0, GROUPS, gl.SliceLayout(1, gl.SliceLayout(2, by_row)))[:, None, None] * WARPS + lane // 32
    place = (strip * groups + scaled) * 64 + quarter * 16 + half * 8 + lane % 32 // 4
    scale = gl.load(scales_ptr + place, mask=scaled < groups, other=0.0).to(gl.float32)

    wait_for_last()
    column = unit * 64 + word * 16 + thread % 4 * 4
    words = _words(x_ptr, x_stride, 0, column, M, K)
    other = words
    if BLOCKS == 2:
        other = _words(x_ptr, x_stride, 8, column, M, K)
    if QUANTISE:
        gl.static_assert(BLOCKS == 1)
        largest = _largest(words)
        largest = gl.maximum(largest & 0xFFFF, (largest >> 16) & 0xFFFF)
        largest = gl.max(gl.max(gl.max(largest, 3), 1), 0)
        rows = gl.max(gl.max(largest.reshape([WARPS, 8, 4]), 2), 0)
        row_scale = gl.maximum((rows << 16).to(gl.float32, bitcast=True) / 448.0, 1e-12)
        inverse = 1.0 / row_scale
        wide = gl.convert_layout(inverse, gl.SliceLayout(0, gl.SliceLayout(2, _lanes(WARPS))))[None, :, None]
        wide = gl.zeros([WARPS, 8, 4], gl.float32, _lanes(WARPS)) + wide
        wide = gl.convert_layout(wide.reshape([THREADS]), of_thread)[None, None, :, None]
        words = _rounded(words, gl.zeros([GROUPS, 2, THREADS, 4], gl.float32, layout) + wide)
        other = words
    sums = multiply_groups(codes, scale, words, other, BLOCKS)

    # Block, warp, g, q, half, e -> token 8 * block + 2 * q + e and row 8 * half + g.
    sums = gl.sum(sums.reshape([2, WARPS, 8, 4, 2, 2]), 1).permute((0, 2, 4, 3, 1)).reshape([16, 16])
    store: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [WARPS, 1], [1, 0])
    total = gl.convert_layout(sums, store)
    token = gl.arange(0, 16, gl.SliceLayout(1, store))
    row = gl.program_id(0) * 16 + gl.arange(0, 16, gl.SliceLayout(0, store))
    if QUANTISE:
        factor = gl.join(row_scale, row_scale).permute((1, 0)).reshape([16])
        factor = gl.convert_layout(factor, gl.SliceLayout(1, store))
    else:
        factor = gl.load(x_scale_ptr + token * x_step, mask=token < M, other=0.0)
    total *= factor[:, None]
    if bias_ptr is not None:
        total += gl.load(bias_ptr + row, mask=row < N, other=0.0).to(gl.float32)[None, :]
    there = (token < M)[:, None] & (row < N)[None, :]
    if residual_ptr is not None:
        source = residual_ptr + token[:, None] * residual_stride + row[None, :]
        total += gl.load(source, mask=there, other=0.0).to(gl.float32)
    gl.store(out_ptr + token[:, None] * out_stride + row[None, :], total.to(out_ptr.dtype.element_ty), mask=there)


@gluon.constexpr_function
def _lanes(warps):
    return gl.BlockedLayout([1, 1, 1], [1, 8, 4], [warps, 1, 1], [2, 1, 0])
