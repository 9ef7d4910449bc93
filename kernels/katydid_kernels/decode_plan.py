"""Deals the KV tiles of a decode batch to CTAs so that all of them finish together, whatever the mix of lengths.

Lay every (request, kv head) on one line, each as long as its tiles of 64 tokens plus a fixed cost per piece (reading the
query, combining), and cut the line into equal intervals, one a CTA.  A long request spreads over as many CTAs as it
needs, short ones share one; no CTA carries more than its interval plus one fixed cost, because the only cost the line
does not count is that of the piece a cut creates.  The cut needs prefix sums only, so every CTA of the planner finds its
own interval by itself: one launch, no atomics, lengths read on the device, good inside a CUDA graph for every layer of
a step.  `decode_plan_reference` walks the same line piece by piece in plain Python.

A plan is int32 `[ctas, 8]`, for each CTA the first piece of its interval and what follows from it:
row, kv head, first tile, tile end, piece of its item, pieces of its item, tiles left after this piece, interval.
Later pieces begin at the next item's first tile, so the attention kernel derives them itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["PIECE_COST", "TILE", "Piece", "decode_plan", "decode_plan_reference"]

TILE = 64
PIECE_COST = 2
MAX_BATCH = 4096


class Piece(NamedTuple):
    """Tiles `[tile_begin, tile_end)` of one (row, kv head), counted from its first visible tile."""

    row: int
    head: int
    tile_begin: int
    tile_end: int
    index: int
    count: int


def decode_plan(
    context_lens: Tensor,
    kv_heads: int,
    *,
    ctas: int,
    q_len: int = 1,
    window: int | None = None,
    min_tiles: int = 4,
    piece_cost: int = PIECE_COST,
    out: Tensor | None = None,
) -> Tensor:
    """Plan one decode step.

    Args:
        context_lens: int32 `[batch]` on the device, tokens per row with the new ones; batch <= 4096.
        kv_heads: KV heads of this rank; each is an item of its own.
        ctas: how many CTAs the attention kernel will run with.
        q_len, window: the new tokens per row and the sliding window: tiles no query can see are left out.
        min_tiles: the smallest interval, in tiles: shorter pieces cost more in combining than they save.
        piece_cost: what a piece costs beyond its tiles, in tiles.
        out: int32 `[ctas, 8]` to write into; given inside captured graphs.

    Raises ValueError for a batch over 4096 or a minimum not above the piece cost.
    """
    batch = len(context_lens)
    if batch > MAX_BATCH:
        raise ValueError(f"context_lens must have at most {MAX_BATCH} rows, got {batch}")
    if min_tiles <= piece_cost:
        raise ValueError(f"min_tiles must exceed piece_cost {piece_cost}, got {min_tiles}")
    plan = torch.empty(ctas, 8, dtype=torch.int32, device=context_lens.device) if out is None else out
    _decode_plan_kernel[(ctas,)](
        context_lens,
        plan,
        batch,
        kv_heads,
        q_len,
        window or 0,
        min_tiles,
        PIECE_COST=piece_cost,
        BLOCK_B=max(32, triton.next_power_of_2(batch)),
        num_warps=1 if batch <= 256 else 4,
    )
    return plan


@triton.jit
def visible_tiles(length, q_len, window):
    """First tile a query of the row can see, and how many there are (at least one, so that every row is written)."""
    first = tl.where(window > 0, tl.maximum(length - q_len - window + 1, 0) // 64, 0)
    return first, tl.maximum((length + 63) // 64 - first, 1)


@triton.jit
def _decode_plan_kernel(
    lens_ptr, plan_ptr, batch, kv_heads, q_len, window, min_tiles, PIECE_COST: tl.constexpr, BLOCK_B: tl.constexpr
):
    cta = tl.program_id(0)
    row = tl.arange(0, BLOCK_B)
    length = tl.load(lens_ptr + row, mask=row < batch, other=0)
    _, tiles = visible_tiles(length, q_len, window)
    cost = tl.where(row < batch, (tiles + PIECE_COST) * kv_heads, 0)
    end = tl.cumsum(cost, 0)
    total = tl.sum(cost, 0)
    ctas = tl.num_programs(0)
    interval = tl.maximum((total + ctas - 1) // ctas, min_tiles)

    begin = cta * interval
    my_row = tl.sum((end <= begin).to(tl.int32), 0)
    row_start = tl.sum(tl.where(end <= begin, cost, 0), 0)
    my_tiles = tl.sum(tl.where(row == my_row, tiles, 0), 0)
    item = my_tiles + PIECE_COST
    head = tl.where(my_row < batch, (begin - row_start) // item, 0)
    start = row_start + head * item
    stop = start + item
    first_tile = tl.maximum(begin - start - PIECE_COST, 0)
    last_tile = tl.minimum(begin + interval, stop) - start - PIECE_COST
    first_cta = (start + PIECE_COST) // interval
    pieces = (stop - 1) // interval - first_cta + 1
    left = tl.maximum(begin + interval - stop, 0)

    idle = begin >= total
    record = plan_ptr + cta * 8
    tl.store(record + 0, tl.where(idle, batch, my_row))
    tl.store(record + 1, head)
    tl.store(record + 2, first_tile)
    tl.store(record + 3, tl.where(idle, 0, last_tile))
    tl.store(record + 4, tl.maximum(cta - first_cta, 0))
    tl.store(record + 5, pieces)
    tl.store(record + 6, tl.where(idle, 0, left))
    tl.store(record + 7, interval)


def decode_plan_reference(
    context_lens: list[int],
    kv_heads: int,
    *,
    ctas: int,
    q_len: int = 1,
    window: int | None = None,
    min_tiles: int = 4,
    piece_cost: int = PIECE_COST,
) -> list[list[Piece]]:
    """The pieces of every CTA, found by walking the items in order and filling one interval after the other."""
    items = []
    for row, length in enumerate(context_lens):
        first = max(length - q_len - window + 1, 0) // TILE if window else 0
        items += [(row, head, max(-(-length // TILE) - first, 1)) for head in range(kv_heads)]
    total = sum(tiles + piece_cost for _, _, tiles in items)
    interval = max(-(-total // ctas), min_tiles)

    plan: list[list[Piece]] = [[] for _ in range(ctas)]
    position = 0
    for row, head, tiles in items:
        position += piece_cost
        cuts = [0]
        while cuts[-1] < tiles:
            room = interval - (position + cuts[-1]) % interval
            cuts.append(min(cuts[-1] + room, tiles))
        for index, (begin, end) in enumerate(zip(cuts, cuts[1:], strict=False)):
            plan[(position + begin) // interval].append(Piece(row, head, begin, end, index, len(cuts) - 1))
        position += tiles
    return plan
