"""Sorts the (token, choice) pairs of few tokens by expert where the router's launch ends, as `plan_routes` would.

A pair is counted, and so ranked among its expert's, by the CTA that chose it. The last CTA to arrive knows all counts:
it lays the experts out one after the other and leads every pair to its row. Counters are zero again then.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["lay_out_pairs", "rank_pairs"]


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def rank_pairs(place, ids, choice, rows, inside, COLUMNS: gl.constexpr):
    """Count pairs ``[ROWS, POWER_K]`` of rows and choices, and leave each one's rank in its slot."""
    counts_ptr, _rows_ptr, slots_ptr, _tiles_ptr, _count_ptr, first_expert, experts = place
    local = ids - first_expert
    valid = inside & (local >= 0) & (local < experts)
    rank = gl.atomic_add(counts_ptr + local, gl.full_like(local, 1), mask=valid, sem="relaxed")
    gl.store(slots_ptr + rows[:, None] * COLUMNS + choice, rank, mask=valid)


@gluon.jit
def lay_out_pairs(
    place, ids_ptr, pairs, arriving, COLUMNS: gl.constexpr, TILE: gl.constexpr, BLOCK: gl.constexpr,
    BLOCK_E: gl.constexpr,
):  # fmt: skip
    """The last of ``arriving`` CTAs writes rows, slots, tiles and their number, as `RoutePlan` has them."""
    counts_ptr, rows_ptr, slots_ptr, tiles_ptr, count_ptr, first_expert, experts = place
    gl.thread_barrier()
    arrivals_ptr = counts_ptr + 2 * experts
    if gl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == arriving - 1:
        gl.store(arrivals_ptr, 0)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        expert = gl.arange(0, BLOCK_E, layout)
        pair = gl.arange(0, BLOCK, layout)
        count = gl.load(counts_ptr + expert, mask=expert < experts, other=0, volatile=True)
        local = gl.load(ids_ptr + pair, mask=pair < pairs, other=-1, volatile=True) - first_expert
        rank = gl.load(slots_ptr + pair, mask=pair < pairs, other=0, volatile=True)
        gl.store(counts_ptr + expert, gl.zeros_like(count), mask=expert < experts)
        end = gl.associative_scan(count, 0, _add)
        start = end - count
        tiles = (count + TILE - 1) // TILE
        end_tile = gl.associative_scan(tiles, 0, _add)
        gl.store(count_ptr, gl.sum(tiles, 0))
        for i in range(gl.max(tiles, 0)):
            entry = tiles_ptr + (end_tile - tiles + i) * 4
            there = i < tiles
            gl.store(entry, expert, mask=there)
            gl.store(entry + 1, start + i * TILE, mask=there)
            gl.store(entry + 2, end, mask=there)
        valid = (pair < pairs) & (local >= 0) & (local < experts)
        slot = gl.gather(start, gl.where(valid, local, 0), 0) + rank
        gl.store(rows_ptr + slot, pair // COLUMNS, mask=valid)
        gl.store(slots_ptr + pair, gl.where(valid, slot, -1), mask=pair < pairs)
