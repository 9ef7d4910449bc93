"""Where the work of the Hopper kernel comes from: the plan says which queries, their list which blocks of keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from katydid_kernels.stem_select.plan import PIECE_FIELDS

__all__ = ["load_listed", "sparse_item"]

FIELDS = gl.constexpr(PIECE_FIELDS)


@gluon.jit
def sparse_item(pieces_ptr, turn, items, heads, together, most):
    """This CTA's `turn`-th piece, dealt back and forth over the sorted plan, once for every `together` heads: row,
    head, first query and end, position, context length, number of blocks, where they begin in their list and where
    that begins, and the place of a partial result or -1.
    """
    ctas = gl.num_programs(0)
    cta = gl.program_id(0)
    place = turn * ctas + gl.where(turn % 2 == 0, cta, ctas - 1 - cta)
    valid = place < items * heads
    batch = place // (items * together)
    within = place - batch * items * together
    head = batch * together + within % together
    record = pieces_ptr + (within // together) * FIELDS
    row = gl.load(record, mask=valid, other=0)
    q_first = gl.load(record + 1, mask=valid, other=0)
    q_end = gl.load(record + 2, mask=valid, other=0)
    position = gl.load(record + 3, mask=valid, other=0)
    length = gl.load(record + 4, mask=valid, other=0)
    count = gl.load(record + 5, mask=valid, other=0)
    begin = gl.load(record + 7, mask=valid, other=0)
    partial = gl.load(record + 8, mask=valid, other=0)
    listed = (gl.load(record + 6, mask=valid, other=0).to(gl.int64) * heads + head) * most + begin
    return valid, row, head, q_first, q_end, position, length, count, begin, listed, partial


@gluon.jit
def _pages(table, block, final_page):
    """The two pages of a block; those behind the context's last stand for it."""
    return gl.load(table + gl.minimum(block * 2, final_page)), gl.load(table + gl.minimum(block * 2 + 1, final_page))


@gluon.jit
def _load_queries(
    q_desc, q_smem, q_full, q_empty, turn, q_first, head, Q_STAGES: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    bits: gl.constexpr = q_desc.dtype.primitive_bitwidth
    DB: gl.constexpr = min(D, 1024 // bits)
    stage = turn % Q_STAGES
    mbarrier.wait(q_empty.index(stage), ((turn // Q_STAGES) & 1) ^ 1)
    mbarrier.expect(q_full.index(stage), 128 * D * bits // 8)
    for w in gl.static_range(2):
        for c in gl.static_range(D // DB):
            target = q_smem.index(stage * 2 + w).slice(c * 64, 64)
            tma.async_copy_global_to_shared(q_desc, [q_first + 64 * w, head * D + c * DB], q_full.index(stage), target)


@gluon.jit
def load_listed(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, pieces_ptr, blocks_ptr, table_ptr, table_stride, items,
    heads, kv_heads, together, most, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, D: gl.constexpr,
    PERMUTE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The loading warp: a block of keys is two pages, each by its own TMA box. Plan and block table are older than the
    kernel before this one.
    """
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    bits: gl.constexpr = k_desc.dtype.primitive_bitwidth
    DB: gl.constexpr = min(D, 1024 // bits)
    KB: gl.constexpr = D // DB
    turn = 0
    i = 0
    valid, row, head, q_first, _q_end, position, length, count, begin, listed, _partial = sparse_item(
        pieces_ptr, turn, items, heads, together, most
    )
    # A list begins with the tile's own block, whose pages are known before the list is.
    table = table_ptr + row.to(gl.int64) * table_stride
    final_page = gl.maximum((length + 63) // 64 - 1, 0)
    first, second = _pages(table, position // 128, final_page)
    if EARLY:
        gdc_wait()
    while valid:
        kv_head = head // (heads // kv_heads)
        if begin > 0:
            first, second = _pages(table, gl.load(blocks_ptr + listed), final_page)
        following = gl.load(blocks_ptr + listed + gl.minimum(1, count - 1))
        for entry in range(count):
            # The next block's pages and the number of the one after it are on their way while this one's are loaded.
            next_first, next_second = _pages(table, following, final_page)
            following = gl.load(blocks_ptr + listed + gl.minimum(entry + 2, count - 1))
            stage = i % STAGES
            phase = ((i // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), 128 * D * bits // 8)
            for p in gl.static_range(2):
                page = first if p == 0 else second
                for c in gl.static_range(KB):
                    target = k_smem.index(stage).slice((c * 2 + p) * 64, 64)
                    if PERMUTE:
                        tma.async_copy_global_to_shared(
                            k_desc,
                            [(page * kv_heads + kv_head) * 4, 0, 0, 0, c * DB],
                            k_full.index(stage),
                            target._reinterpret(k_desc.dtype, [4, 2, 4, 2, DB], k_desc.layout),
                        )
                    else:
                        tma.async_copy_global_to_shared(
                            k_desc, [(page * kv_heads + kv_head) * 64, c * DB], k_full.index(stage), target
                        )
            if entry == 0:
                # Behind the first keys: those need not wait for the tile before to be done with its queries.
                _load_queries(q_desc, q_smem, q_full, q_empty, turn, q_first, head, Q_STAGES, D)
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), 128 * D * bits // 8)
            for p in gl.static_range(2):
                page = first if p == 0 else second
                tma.async_copy_global_to_shared(
                    v_desc, [(page * kv_heads + kv_head) * D, 0], v_full.index(stage),
                    v_smem.index(stage).slice(p * D, D),
                )  # fmt: skip
            first = next_first
            second = next_second
            i += 1
        turn += 1
        valid, row, head, q_first, _q_end, position, length, count, begin, listed, _partial = sparse_item(
            pieces_ptr, turn, items, heads, together, most
        )
        table = table_ptr + row.to(gl.int64) * table_stride
        final_page = gl.maximum((length + 63) // 64 - 1, 0)
        first, second = _pages(table, position // 128, final_page)
