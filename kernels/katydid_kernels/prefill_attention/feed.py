"""Where the tiles of the Hopper prefill kernel come from: the plan says which, the loading warp brings their pages."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

__all__ = ["BLOCK_M", "load_tiles", "plan_item"]

BLOCK_M = gl.constexpr(128)


@gluon.jit
def plan_item(plan_ptr, turn, items, heads, together, window, N: gl.constexpr):
    """Row, first query, head and KV tile range of this CTA's `turn`-th tile, dealt back and forth over the sorted plan.

    The plan is gone through once for every `together` heads.
    """
    ctas = gl.num_programs(0)
    cta = gl.program_id(0)
    place = turn * ctas + gl.where(turn % 2 == 0, cta, ctas - 1 - cta)
    valid = place < items * heads
    batch = place // (items * together)
    within = place - batch * items * together
    record = plan_ptr + 8 + (within // together) * 8
    row = gl.load(record, mask=valid, other=0)
    q_first = gl.load(record + 1, mask=valid, other=0)
    q_end = gl.load(record + 2, mask=valid, other=0)
    position = gl.load(record + 3, mask=valid, other=0)
    length = gl.load(record + 4, mask=valid, other=0)
    first = gl.where(window > 0, gl.maximum(position - window + 1, 0) // N, 0)
    last = gl.maximum((gl.minimum(position + BLOCK_M, length) + N - 1) // N, first + 1)
    return valid, row, batch * together + within % together, q_first, q_end, position, first, last, length


@gluon.jit
def load_tiles(
    q_desc,
    k_desc,
    v_desc,
    q_smem,
    k_smem,
    v_smem,
    bars,
    plan_ptr,
    table_ptr,
    table_stride,
    heads,
    kv_heads,
    together,
    window,
    STAGES: gl.constexpr,
    D: gl.constexpr,
    N: gl.constexpr,
    PERMUTE: gl.constexpr,
):
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    bits: gl.constexpr = k_desc.dtype.primitive_bitwidth
    DB: gl.constexpr = min(D, 1024 // bits)
    PAGES: gl.constexpr = N // 64
    KB: gl.constexpr = D // DB
    items = gl.load(plan_ptr)
    turn = 0
    i = 0
    valid, row, head, q_first, _q_end, _position, first, last, length = plan_item(
        plan_ptr, turn, items, heads, together, window, N
    )
    while valid:
        table = table_ptr + row.to(gl.int64) * table_stride
        final_page = gl.maximum((length + 63) // 64 - 1, 0)
        kv_head = head // (heads // kv_heads)
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_full, BLOCK_M * D * bits // 8)
        for w in gl.static_range(BLOCK_M // 64):
            for c in gl.static_range(KB):
                tma.async_copy_global_to_shared(
                    q_desc, [q_first + 64 * w, head * D + c * DB], q_full, q_smem.index(w).slice(c * 64, 64)
                )
        for back in range(last - first):
            tile = last - 1 - back
            stage = i % STAGES
            phase = ((i // STAGES) & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), N * D * bits // 8)
            for p in gl.static_range(PAGES):
                page = gl.load(table + gl.minimum(tile * PAGES + p, final_page))
                for c in gl.static_range(KB):
                    block = k_smem.index(stage).slice((c * PAGES + p) * 64, 64)
                    if PERMUTE:
                        tma.async_copy_global_to_shared(
                            k_desc,
                            [(page * kv_heads + kv_head) * 4, 0, 0, 0, c * DB],
                            k_full.index(stage),
                            block._reinterpret(k_desc.dtype, [4, 2, 4, 2, DB], k_desc.layout),
                        )
                    else:
                        tma.async_copy_global_to_shared(
                            k_desc, [(page * kv_heads + kv_head) * 64, c * DB], k_full.index(stage), block
                        )
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), N * D * bits // 8)
            for p in gl.static_range(PAGES):
                page = gl.load(table + gl.minimum(tile * PAGES + p, final_page))
                tma.async_copy_global_to_shared(
                    v_desc,
                    [(page * kv_heads + kv_head) * D, 0],
                    v_full.index(stage),
                    v_smem.index(stage).slice(p * D, D),
                )
            i += 1
        turn += 1
        valid, row, head, q_first, _q_end, _position, first, last, length = plan_item(
            plan_ptr, turn, items, heads, together, window, N
        )
