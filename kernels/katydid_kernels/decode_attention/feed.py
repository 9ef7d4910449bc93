"""Where the tiles of the Hopper decode kernel come from: a CTA walks its share of the plan, a warp streams the pages.

Both halves of a CTA, the loading warp and the computing warpgroup, walk the plan for themselves and never speak of it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from katydid_kernels.decode_plan import RECORD as PLAN_RECORD

__all__ = ["clear_unwritten", "first_piece", "next_piece", "stream_pages"]

RECORD = gl.constexpr(PLAN_RECORD)


@gluon.jit
def first_piece(plan_ptr):
    """Row, head, first and end tile, index, pieces of the item, interval left, interval, the row's length."""
    record = plan_ptr + gl.program_id(0) * RECORD
    # Volatile, or the compiler moves all but the row behind the test of the row, and a CTA waits twice.
    return (
        gl.load(record, volatile=True),
        gl.load(record + 1, volatile=True),
        gl.load(record + 2, volatile=True),
        gl.load(record + 3, volatile=True),
        gl.load(record + 4, volatile=True),
        gl.load(record + 5, volatile=True),
        gl.load(record + 6, volatile=True),
        gl.load(record + 7, volatile=True),
        gl.load(record + 8, volatile=True),
    )


@gluon.jit
def _planned_pages(plan_ptr, PAGES: gl.constexpr):
    """The pages of the first load, which stand in the plan where there was a block table to plan with; else -1."""
    record = plan_ptr + gl.program_id(0) * RECORD + 9
    pages = ()
    for p in gl.static_range(PAGES):
        pages += (gl.load(record + p, volatile=True),)  # type: ignore[assignment]
    return pages


@gluon.jit
def next_piece(row, head, left, interval, batch, kv_heads, lens_ptr, window, piece_cost, Q_LEN: gl.constexpr):
    """The following item from its first visible tile on, as far as the CTA's interval reaches; row = batch when
    done."""
    row += ((head + 1) == kv_heads).to(gl.int32)
    head = gl.where(head + 1 == kv_heads, 0, head + 1)
    left -= piece_cost
    row = gl.where(left > 0, row, batch)
    length = gl.load(lens_ptr + row, mask=row < batch, other=0)
    stored = (length + 63) // 64
    first = gl.where(window > 0, gl.maximum(length - Q_LEN - window + 1, 0) // 64, 0)
    tiles = gl.maximum(stored - first, 1)
    take = gl.minimum(tiles, left)
    count = 1 + (tiles - take + interval - 1) // interval
    return row, head, first, gl.minimum(first + take, stored), count, left - take, length


@gluon.jit
def stream_pages(
    k_desc,
    v_desc,
    k_smem,
    v_smem,
    full,
    empty,
    table_ptr,
    lens_ptr,
    plan_ptr,
    batch,
    kv_heads,
    table_stride,
    window,
    piece_cost,
    Q_LEN: gl.constexpr,
    D: gl.constexpr,
    BOX: gl.constexpr,
    PAGES: gl.constexpr,
    STAGES: gl.constexpr,
    PERMUTE: gl.constexpr,
):
    V_ROWS: gl.constexpr = v_smem.shape[1] // PAGES
    page_bytes: gl.constexpr = 2 * 64 * D * k_desc.dtype.primitive_bitwidth // 8
    row, head, first, last, _index, _count, left, interval, length = first_piece(plan_ptr)
    planned = _planned_pages(plan_ptr, PAGES)
    waited = row < 0
    step = 0
    while row < batch:
        table = table_ptr + row.to(gl.int64) * table_stride
        for tile in range(first, last, PAGES):
            if not waited and (tile + PAGES) * 64 > length - Q_LEN:
                gdc_wait()
                waited = True
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            pages = gl.minimum(last - tile, PAGES)
            known = (step == 0) & (planned[0] >= 0)
            for n in gl.static_range(1, PAGES + 1):
                mbarrier.expect(full.index(stage), page_bytes * n, pred=pages == n)
            for p in gl.static_range(PAGES):
                page = gl.load(table + tile + p, mask=(p < pages) & (not known), other=0)
                page = gl.where(known, planned[p], page)
                for c in gl.static_range(D // BOX):
                    block = k_smem.index(stage).slice((c * PAGES + p) * 64, 64)
                    page_of_head = page * kv_heads + head
                    if PERMUTE:
                        tma.async_copy_global_to_shared(
                            k_desc,
                            [page_of_head * 4, 0, 0, 0, c * BOX],
                            full.index(stage),
                            block._reinterpret(k_desc.dtype, [4, 2, 4, 2, BOX], k_desc.layout),
                            pred=p < pages,
                        )
                    else:
                        tma.async_copy_global_to_shared(
                            k_desc, [page_of_head * 64, c * BOX], full.index(stage), block, pred=p < pages
                        )
                tma.async_copy_global_to_shared(
                    v_desc,
                    [(page * kv_heads + head) * V_ROWS, 0],
                    full.index(stage),
                    v_smem.index(stage).slice(p * V_ROWS, V_ROWS),
                    pred=p < pages,
                )
            step += 1
        row, head, first, last, _count, left, length = next_piece(
            row, head, left, interval, batch, kv_heads, lens_ptr, window, piece_cost, Q_LEN
        )


@gluon.jit
def clear_unwritten(v_tile, tokens, PAGES: gl.constexpr):
    """Zero the values of a stage from token `tokens` on: a weight of zero does not silence a NaN."""
    V_ROWS: gl.constexpr = v_tile.shape[0] // PAGES
    WIDTH: gl.constexpr = v_tile.shape[1]
    vec: gl.constexpr = 128 // v_tile.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout([1, vec], [32 * vec // WIDTH, WIDTH // vec], [4, 1], [1, 0])
    for p in gl.static_range(PAGES):
        if tokens < (p + 1) * 64:
            page = v_tile.slice(p * V_ROWS, V_ROWS)
            token = gl.arange(0, WIDTH, gl.SliceLayout(0, layout)) % 64 + p * 64
            values = page.load(layout)
            page.store(gl.where((token < tokens)[None, :], values, gl.zeros_like(values)))
    fence_async_shared()
    gl.thread_barrier()
