"""Selection on the GPU in three launches: pooled keys and queries, their products, and the best of each row.

The products are a matrix product with the tensor cores; everything else reads its input once. Scores of a row's tile
and block depend on that tile and block alone, so chunks of a prompt come to the same bits. EARLY: a kernel is launched
while the one before it runs, and waits for it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["pool_kernel", "score_kernel", "select_kernel"]

LOWEST = tl.constexpr(-2147483648)


@triton.jit
def _pool_keys(
    block, head, k_ptr, v_ptr, table_ptr, pooled_ptr, bias_ptr, k_scale_ptr, v_scale_ptr, length, blocks, kv_heads,
    value_weight, PER_HEAD: tl.constexpr, STRIDE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Of a block of 128 keys of a kv head: the sums of its keys by residue, last residue first, and beta times the
    logarithm of its largest value.
    """
    d = tl.arange(0, D)
    residue = tl.arange(0, STRIDE)
    k_factor = 1.0
    v_factor = 1.0
    if k_scale_ptr is not None:
        k_factor = tl.load(k_scale_ptr + head * PER_HEAD)
        v_factor = tl.load(v_scale_ptr + head * PER_HEAD)
    total = tl.zeros((STRIDE, D), tl.float32)
    largest = 0.0
    # Unrolled, so that all reads are under way at once.
    for half in tl.static_range(2):
        first = block * 128 + half * 64
        if first < length:
            page = tl.load(table_ptr + block * 2 + half).to(tl.int64)
            base = (page * kv_heads + head) * (64 * D)
            for step in tl.static_range(64 // STRIDE):
                token = step * STRIDE + residue
                inside = (first + token < length)[:, None]
                k = tl.load(k_ptr + base + token[:, None] * D + d[None, :], mask=inside, other=0.0)
                total += k.to(tl.float32)
            slot = tl.arange(0, 64)
            v = tl.load(v_ptr + base + d[:, None] * 64 + slot[None, :]).to(tl.float32)
            squares = tl.sum(tl.where((first + slot < length)[None, :], v * v, 0.0), 0)
            largest = tl.maximum(largest, tl.max(squares, 0))
    norm = tl.sqrt(largest) * v_factor
    place = head * blocks + block
    tl.store(bias_ptr + place, value_weight * tl.log(tl.maximum(norm, 1.0)))
    target = pooled_ptr + place.to(tl.int64) * (STRIDE * D) + (STRIDE - 1 - residue)[:, None] * D + d[None, :]
    tl.store(target, (total * k_factor).to(pooled_ptr.dtype.element_ty))


@triton.jit
def _pool_queries(
    tile, head, q_ptr, q_scale_ptr, records_ptr, pooled_ptr, first_tile, tiles, heads, scale, STRIDE: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Of a tile and a head: the sums of its queries by residue, times what the score asks for."""
    record = records_ptr + (first_tile + tile) * 8
    first = tl.load(record + 1)
    end = tl.load(record + 2)
    offset = tl.load(record + 3) % 128
    d = tl.arange(0, D)
    residue = tl.arange(0, STRIDE)
    total = tl.zeros((STRIDE, D), tl.float32)
    for step in tl.static_range(128 // STRIDE):
        token = first - offset + step * STRIDE + residue
        inside = (token >= first) & (token < end)
        place = token.to(tl.int64) * heads + head
        q = tl.load(q_ptr + place[:, None] * D + d[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        if q_scale_ptr is not None:
            q *= tl.load(q_scale_ptr + place, mask=inside, other=0.0)[:, None]
        total += q
    total *= scale * (STRIDE * STRIDE / 128.0) / (end - first).to(tl.float32)
    target = pooled_ptr + ((head * tiles + tile) * STRIDE + residue)[:, None] * D + d[None, :]
    tl.store(target, total.to(pooled_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["length", "blocks", "first_tile", "tiles"])
def pool_kernel(
    k_ptr, v_ptr, table_ptr, keys_ptr, bias_ptr, k_scale_ptr, v_scale_ptr, length, blocks, kv_heads, value_weight,
    q_ptr, q_scale_ptr, records_ptr, queries_ptr, first_tile, tiles, heads, scale, PER_HEAD: tl.constexpr,
    STRIDE: tl.constexpr, D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row: programs of (block of 128 keys, kv head), then of (tile, head)."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    item = tl.program_id(0)
    if item < blocks * kv_heads:
        _pool_keys(
            item % blocks, item // blocks, k_ptr, v_ptr, table_ptr, keys_ptr, bias_ptr, k_scale_ptr, v_scale_ptr,
            length, blocks, kv_heads, value_weight, PER_HEAD, STRIDE, D,
        )  # fmt: skip
    else:
        item -= blocks * kv_heads
        _pool_queries(
            item % tiles, item // tiles, q_ptr, q_scale_ptr, records_ptr, queries_ptr, first_tile, tiles, heads, scale,
            STRIDE, D,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tiles", "blocks"])
def score_kernel(
    q_ptr, k_ptr, bias_ptr, scores_ptr, tiles, blocks, group, K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (BLOCK_M tiles, BLOCK_N blocks of keys, head): fp32 scores ``[heads, tiles, blocks]`` of one row."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(2)
    kv_head = head // group
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    q_rows = q_ptr + (head * tiles + m).to(tl.int64)[:, None] * K
    k_rows = k_ptr + (kv_head * blocks + n).to(tl.int64)[None, :] * K
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        a = tl.load(q_rows + (first + k)[None, :], mask=(m < tiles)[:, None], other=0.0)
        b = tl.load(k_rows + (first + k)[:, None], mask=(n < blocks)[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    acc += tl.load(bias_ptr + kv_head * blocks + n, mask=n < blocks, other=0.0)[None, :]
    place = (head * tiles + m).to(tl.int64)[:, None] * blocks + n[None, :]
    tl.store(scores_ptr + place, acc, mask=(m < tiles)[:, None] & (n < blocks)[None, :])


@triton.jit(do_not_specialize=["first_tile", "blocks", "most"])
def select_kernel(
    scores_ptr, records_ptr, lists_ptr, first_tile, blocks, heads, most, sink, window, BLOCK: tl.constexpr,
    DENSE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (tile, head): its list of blocks, newest first. DENSE: all of them, for tiles of rows that keep all."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    tile = first_tile + tl.program_id(0)
    head = tl.program_id(1)
    record = records_ptr + tile * 8
    own = tl.load(record + 3) // 128
    wanted = tl.load(record + 5)
    back = tl.arange(0, BLOCK)
    target = lists_ptr + (tile.to(tl.int64) * heads + head) * most
    block = own - back
    if DENSE:
        if tl.load(record + 7) < 0:
            tl.store(target + back, block, mask=block >= 0)
    else:
        place = (head * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * blocks
        score = tl.load(scores_ptr + place + block, mask=block >= 0, other=0.0)
        bits = (score + 0.0).to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        key = tl.where((block < sink) | (back <= window), 0x7FFFFFFF, key)
        key = tl.where(block >= 0, key, LOWEST)
        kth = tl.where(tl.sum((key >= 0).to(tl.int32), 0) >= wanted, 0, LOWEST)
        step = 1 << 30
        for _ in range(31):
            higher = kth + step
            kth = tl.where(tl.sum((key >= higher).to(tl.int32), 0) >= wanted, higher, kth)
            step = step >> 1
        larger = key > kth
        equal = (key == kth).to(tl.int32)
        room = wanted - tl.sum(larger.to(tl.int32), 0)
        keep = larger | ((equal != 0) & (tl.cumsum(equal, 0) <= room))
        index = tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(target + index, block, mask=keep)
