"""The weighted sum of each token's rows of y inside an expert kernel, a piece of some tokens' rows at a time.

A warp's lanes lie side by side over a row, 16 bytes each; a thread holds all choices of the tokens it sums, so that all
their rows can be asked for at once.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["piece_layout", "routes_of", "sum_choices"]


@gluon.constexpr_function
def piece_layout(piece, each=8):
    """A warpgroup over a piece of 128 or 256 columns of 8 or 4 tokens; `each` elements of a row in a thread."""
    return gl.BlockedLayout([1, each], [256 // piece, piece // 8], [4, 1], [1, 0])


@gluon.jit
def routes_of(
    group, slots_ptr, weights_ptr, tokens, PIECE: gl.constexpr, TOKENS: gl.constexpr, TOP_K: gl.constexpr,
    PADDED: gl.constexpr,
):  # fmt: skip
    """Slots and weights ``[TOKENS, PADDED]`` of a group, all choices of a token in every thread that sums it; PADDED is
    TOP_K rounded up to a power of two."""
    layout: gl.constexpr = piece_layout(PIECE, PADDED)
    token = group * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    choice = gl.arange(0, PADDED, gl.SliceLayout(0, layout))
    there = (token < tokens)[:, None] & (choice < TOP_K)[None, :]
    place = token[:, None] * TOP_K + choice[None, :]
    return gl.load(slots_ptr + place, mask=there, other=-1), gl.load(weights_ptr + place, mask=there, other=0.0)


@gluon.jit
def sum_choices(y_ptr, stride, place, slots, weights, PIECE: gl.constexpr, TOP_K: gl.constexpr):
    """fp32 ``[TOKENS, PIECE]``: the weighted sum of the rows that `slots` name, of the columns at `place`."""
    layout: gl.constexpr = piece_layout(PIECE)
    choice = gl.arange(0, slots.shape[1], gl.SliceLayout(0, slots.type.layout))
    total = gl.zeros([slots.shape[0], PIECE], gl.float32, layout)
    for j in gl.static_range(TOP_K):
        chosen = (choice == j)[None, :]
        slot = gl.convert_layout(gl.sum(gl.where(chosen, slots, 0), 1), gl.SliceLayout(1, layout))
        weight = gl.convert_layout(gl.sum(gl.where(chosen, weights, 0.0), 1), gl.SliceLayout(1, layout))
        source = y_ptr + gl.maximum(slot, 0).to(gl.int64)[:, None] * stride + place[None, :]
        # A row nobody wrote may hold NaN: it is left out, not multiplied by zero.
        part = gl.load(source, cache_modifier=".cg").to(gl.float32)
        total += gl.where((slot >= 0)[:, None], weight[:, None] * part, 0.0)
    return total
