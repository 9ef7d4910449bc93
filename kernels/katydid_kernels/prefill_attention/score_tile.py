"""What a consumer of the Hopper prefill kernel does to a tile of scores, written for the registers it lies in.

A tile is `[64, N]` in the tensor cores' accumulator layout: a lane holds, in each block of eight columns, two
neighbouring columns of two rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["LOG2E", "add_columns", "cap_scores", "mask_scores", "ordered", "probability_operand"]

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def cap_scores(s, soft_cap):
    """soft_cap * tanh(s / soft_cap), in units of log 2."""
    return soft_cap * LOG2E * (1.0 - 2.0 / (1.0 + gl.exp2(s * (2.0 * LOG2E / soft_cap))))


@gluon.jit
def mask_scores(s, newest, oldest, WINDOW: gl.constexpr, PERMUTE: gl.constexpr):
    """Hide the columns that lie after a row's `newest` and, with WINDOW, those not after its `oldest`.

    A column's token splits into a part that is one number in a lane and a part that is a constant of the register, so
    each score is compared with an immediate and no column numbers occupy registers.
    """
    n = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    if PERMUTE:
        lane = (n & 6) * 2
        fixed = (n & -16) + (n & 8) // 4 + (n & 1)
    else:
        lane = n & 6
        fixed = n & -7
    s = gl.where(fixed[None, :] <= newest[:, None] - lane[None, :], s, float("-inf"))
    if WINDOW:
        s = gl.where(fixed[None, :] > oldest[:, None] - lane[None, :], s, float("-inf"))
    return s


@gluon.jit
def add_columns(total, p, shrink, N: gl.constexpr):
    """Row sums as each lane sees them, `[64, 8]`: the lanes of a row meet once at the end, not in every tile."""
    layout: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    return total * gl.convert_layout(shrink, layout)[:, None] + gl.sum(p.reshape([64, N // 8, 8]), 1)


@gluon.jit
def ordered(total):
    """The same row sums, but nothing that they are made of can be scheduled behind what follows.

    The assembler moves a wait for the tensor cores as far up as it can, above the softmax that should overlap with
    them; it does not move it across a store to shared memory.  This one stands on a condition that never holds.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred q;
        .reg .f32 t;
        add.f32 t, $4, $5;
        add.f32 t, t, $6;
        add.f32 t, t, $7;
        setp.lt.f32 q, t, 0f00000000;
        .reg .u32 a; mov.u32 a, 0; @q st.shared.f32 [a], t;
        mov.f32 $0, $4;
        mov.f32 $1, $5;
        mov.f32 $2, $6;
        mov.f32 $3, $7;
        }""",
        "=f,=f,=f,=f,f,f,f,f",
        [total],
        dtype=gl.float32,
        is_pure=False,
        pack=4,
    )


@gluon.jit
def probability_operand(p, dtype: gl.constexpr, N: gl.constexpr, layout: gl.constexpr, PERMUTE: gl.constexpr):
    """The probabilities as the left operand of the output product, tokens in page order."""
    if PERMUTE:
        p = p.reshape([64, N // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4]).reshape([64, N])
        p = gl.convert_layout(p, layout, assert_trivial=True)
        # Packs by fours at once: element-wise casts to fp8 take three times the instructions to unpack and repack.
        return gl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,r,r,r,r",
            [p],
            dtype=gl.float8e4nv,
            is_pure=True,
            pack=4,
        )
    else:
        return gl.convert_layout(p.to(dtype), layout)
