"""Prefill on Hopper: one warp feeds pages through TMA, two warpgroups each own 64 queries and overlap both products.

A consumer issues the scores of the next tile and the output product of the current one together, then does the softmax of
the next tile while the output product still runs, so the tensor cores do not wait for the exponentials.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

__all__ = ["prefill_hopper_kernel"]

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _load_tiles(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, table, q_row, head, kv_head, kv_heads, n_tiles,
    STAGES: gl.constexpr, D: gl.constexpr, N: gl.constexpr, BLOCK_M: gl.constexpr, DB: gl.constexpr,
):
    q_bar, k_full, k_empty, v_full, v_empty = bars
    PAGES: gl.constexpr = N // 64
    KB: gl.constexpr = D // DB
    mbarrier.expect(q_bar, BLOCK_M * D * q_desc.dtype.primitive_bitwidth // 8)
    for w in gl.static_range(BLOCK_M // 64):
        for c in gl.static_range(KB):
            tma.async_copy_global_to_shared(
                q_desc, [q_row + 64 * w, head * D + c * DB], q_bar, q_smem.index(w).slice(c * 64, 64)
            )
    for i in range(n_tiles):
        tile = n_tiles - 1 - i
        stage = i % STAGES
        phase = ((i // STAGES) & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), phase)
        mbarrier.expect(k_full.index(stage), N * D * k_desc.dtype.primitive_bitwidth // 8)
        for p in gl.static_range(PAGES):
            page = gl.load(table + tile * PAGES + p)
            for c in gl.static_range(KB):
                tma.async_copy_global_to_shared(
                    k_desc, [(page * kv_heads + kv_head) * 64, c * DB], k_full.index(stage),
                    k_smem.index(stage).slice((c * PAGES + p) * 64, 64),
                )
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(v_full.index(stage), N * D * k_desc.dtype.primitive_bitwidth // 8)
        for p in gl.static_range(PAGES):
            page = gl.load(table + tile * PAGES + p)
            tma.async_copy_global_to_shared(
                v_desc, [(page * kv_heads + kv_head) * D, 0], v_full.index(stage), v_smem.index(stage).slice(p * D, D)
            )


@gluon.jit
def _attend(
    which: gl.constexpr, q_smem, k_smem, v_smem, bars, out_ptr, lse_ptr, q_first, q_end, position, head, heads, n_tiles,
    scale, STAGES: gl.constexpr, D: gl.constexpr, N: gl.constexpr, DB: gl.constexpr,
):
    q_bar, k_full, k_empty, v_full, v_empty = bars
    dtype: gl.constexpr = q_smem.dtype
    bits: gl.constexpr = dtype.primitive_bitwidth
    PAGES: gl.constexpr = N // 64
    KB: gl.constexpr = D // DB
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 256 // bits])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 256 // bits])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 32 // bits)
    kq_layout: gl.constexpr = gl.NVMMASharedLayout(128, bits, 2)
    v_layout: gl.constexpr = gl.NVMMASharedLayout(64 * bits // 8, bits, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_row: gl.constexpr = gl.SliceLayout(1, o_layout)

    q = q_smem.index(which)._reinterpret(dtype, [64, D], kq_layout)
    rows = gl.arange(0, 64, row_layout) + which * 64
    at = position + rows
    columns = gl.arange(0, N, gl.SliceLayout(0, s_layout))
    maximum = gl.full([64], float("-inf"), gl.float32, row_layout)
    total = gl.full([64], 0.0, gl.float32, row_layout)
    acc = gl.zeros([64, D], gl.float32, o_layout)
    zero = gl.zeros([64, N], gl.float32, s_layout)
    factor = scale * LOG2E

    mbarrier.wait(q_bar, 0)
    mbarrier.wait(k_full.index(0), 0)
    k = k_smem.index(0)._reinterpret(dtype, [N, D], kq_layout)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(0))
    token = (n_tiles - 1) * N + columns
    s = gl.where(token[None, :] <= at[:, None], s, float("-inf"))
    maximum = gl.max(s, 1) * factor
    maximum = gl.where(maximum == float("-inf"), 0.0, maximum)
    p = gl.exp2(s * factor - maximum[:, None])
    total = gl.sum(p, 1)
    p = gl.convert_layout(p.to(dtype), p_layout)
    for i in range(1, n_tiles):
        stage = i % STAGES
        mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
        k = k_smem.index(stage)._reinterpret(dtype, [N, D], kq_layout)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        before = (i - 1) % STAGES
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        v = v_smem.index(before)._reinterpret(dtype, [D, N], v_layout)
        acc = warpgroup_mma(p, v.permute((1, 0)), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(stage))
        if i < 2:
            token = (n_tiles - 1 - i) * N + columns
            s = gl.where(token[None, :] <= at[:, None], s, float("-inf"))
        new_maximum = gl.maximum(maximum, gl.max(s, 1) * factor)
        p32 = gl.exp2(s * factor - new_maximum[:, None])
        keep = gl.exp2(maximum - new_maximum)
        total = total * keep + gl.sum(p32, 1)
        maximum = new_maximum
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(before))
        acc = acc * gl.convert_layout(keep, o_row)[:, None]
        p = gl.convert_layout(p32.to(dtype), p_layout)
    before = (n_tiles - 1) % STAGES
    mbarrier.wait(v_full.index(before), ((n_tiles - 1) // STAGES) & 1)
    v = v_smem.index(before)._reinterpret(dtype, [D, N], v_layout)
    acc = warpgroup_mma(p, v.permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    inverse = 1.0 / gl.where(total == 0.0, 1.0, total)
    acc = acc * gl.convert_layout(inverse, o_row)[:, None]
    o_rows = q_first + which * 64 + gl.arange(0, 64, o_row)
    d = gl.arange(0, D, gl.SliceLayout(0, o_layout))
    offset = (o_rows.to(gl.int64) * heads + head) * D
    gl.store(out_ptr + offset[:, None] + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=(o_rows < q_end)[:, None])
    gl.store(
        lse_ptr + (q_first + rows) * heads + head, (maximum + gl.log2(total)) / LOG2E, mask=q_first + rows < q_end
    )


@gluon.jit
def prefill_hopper_kernel(
    q_desc, k_desc, v_desc, table_ptr, lens_ptr, cu_ptr, out_ptr, lse_ptr, heads, kv_heads, table_stride, scale,
    STAGES: gl.constexpr, D: gl.constexpr, N: gl.constexpr, DB: gl.constexpr,
):
    BLOCK_M: gl.constexpr = 128
    bits: gl.constexpr = q_desc.dtype.primitive_bitwidth
    dtype: gl.constexpr = q_desc.dtype
    PAGES: gl.constexpr = N // 64
    KB: gl.constexpr = D // DB
    row = gl.program_id(2)
    head = gl.program_id(1)
    q_begin = gl.load(cu_ptr + row)
    q_end = gl.load(cu_ptr + row + 1)
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    q_first = q_begin + tile * BLOCK_M
    if q_first < q_end:
        length = gl.load(lens_ptr + row)
        position = length - (q_end - q_first)
        n_tiles = (gl.minimum(position + BLOCK_M, length) + N - 1) // N
        kq_layout: gl.constexpr = gl.NVMMASharedLayout(128, bits, 2)
        v_layout: gl.constexpr = gl.NVMMASharedLayout(64 * bits // 8, bits, 2)
        q_smem = gl.allocate_shared_memory(dtype, [2, KB * 64, DB], gl.NVMMASharedLayout(128, bits, 2))
        k_smem = gl.allocate_shared_memory(dtype, [STAGES, PAGES * KB * 64, DB], gl.NVMMASharedLayout(128, bits, 2))
        v_smem = gl.allocate_shared_memory(
            dtype, [STAGES, PAGES * D, 64], gl.NVMMASharedLayout(64 * bits // 8, bits, 2)
        )
        q_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(q_bar, count=1)
        for s in gl.static_range(STAGES):
            mbarrier.init(k_full.index(s), count=1)
            mbarrier.init(k_empty.index(s), count=2)
            mbarrier.init(v_full.index(s), count=1)
            mbarrier.init(v_empty.index(s), count=2)
        fence_async_shared()
        bars = (q_bar, k_full, k_empty, v_full, v_empty)
        table = table_ptr + row.to(gl.int64) * table_stride
        kv_head = head // (heads // kv_heads)
        gl.warp_specialize(
            [
                (_attend, (gl.constexpr(0), q_smem, k_smem, v_smem, bars, out_ptr, lse_ptr, q_first, q_end, position, head,
                           heads, n_tiles, scale, STAGES, D, N, DB)),
                (_attend, (gl.constexpr(1), q_smem, k_smem, v_smem, bars, out_ptr, lse_ptr, q_first, q_end, position, head,
                           heads, n_tiles, scale, STAGES, D, N, DB)),
                (_load_tiles, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, bars, table, q_first, head, kv_head,
                               kv_heads, n_tiles, STAGES, D, N, BLOCK_M, DB)),
            ],
            [4, 4],
            [240, 24],
        )
