"""Deals the KV tiles of a decode batch to CTAs so that all of them finish together, whatever the mix of lengths.

An item is one (request, kv head): its visible tiles of 64 tokens, and at least one so that every row is written.  Two
ways to cut items into pieces, of which the planner takes the first that fits:

* **aligned**: every CTA gets one piece.  The smallest piece size is sought with which the pieces number no more than
  the CTAs.  No CTA reads two queries or combines twice.  Pieces of an item are equal; more than `FAN` of them combine
  in two rounds, so they are DEEP tiles shorter than other items' and both rounds are over when those end.
* **packed**: all items lie on one line, each as long as its tiles plus a fixed cost a piece (reading the query,
  combining), and every CTA takes one interval of equal length.  A long item spreads over many CTAs, short ones share
  one; no CTA carries more than its interval plus one fixed cost, that of the piece which a cut creates.

Both need prefix sums only, so each CTA of the planner finds its own interval: one launch, no atomics, lengths read on
the device, good inside a CUDA graph and for every layer of a step.  `decode_plan_reference` cuts the same items in
plain Python.

A plan is int32 `[ctas, 16]`, per CTA its first piece and what follows from it: row, kv head, first tile, end tile,
index of the piece in its item, pieces of the item, interval left after the piece, interval, the row's length, and the
pages of its first four tiles (-1 where no block table was given), so that the first load waits for nothing else.
Further pieces of a CTA begin at the first visible tile of the next item, so the attention kernel derives them itself.
An idle CTA has row = batch.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "DEEP",
    "FAN",
    "MIN_TILES",
    "PIECE_COST",
    "RECORD",
    "TILE",
    "Piece",
    "decode_plan",
    "decode_plan_reference",
    "decode_plan_static",
]

TILE = 64
RECORD = 16
FAN = 16
PIECE_COST = 2
MIN_TILES = 4
DEEP = 4
_PAGES = 4
MAX_BATCH = 4096
_CANDIDATES = 16
_CANDIDATE_STEP = 32


class Piece(NamedTuple):
    """Tiles `[tile_begin, tile_end)` of one (row, kv head); piece `part` of the `parts` that the item was cut into."""

    row: int
    head: int
    tile_begin: int
    tile_end: int
    part: int
    parts: int


def decode_plan(
    context_lens: Tensor,
    kv_heads: int,
    *,
    ctas: int,
    q_len: int = 1,
    window: int | None = None,
    block_table: Tensor | None = None,
    min_tiles: int = MIN_TILES,
    piece_cost: int = PIECE_COST,
    deep: int = DEEP,
    out: Tensor | None = None,
) -> Tensor:
    """Plan one decode step.

    Args:
        context_lens: int32 `[batch]` on the device, tokens per row with the new ones; batch <= 4096.
        kv_heads: KV heads of this rank; each is an item of its own.
        ctas: how many CTAs the attention kernel will run with.
        q_len, window: the new tokens per row and the sliding window: tiles no query can see are left out.
        block_table: int32 `[batch, max_pages]` that the attention calls will get; saves each of them a round trip.
        min_tiles: no item is cut into pieces smaller than this: combining them would cost more than it saves.
        piece_cost: what a piece costs beyond its tiles, in tiles.
        deep: by how many tiles the pieces of an item that combines in two rounds are shorter than others.
        out: int32 `[ctas, 16]` to write into; given inside captured graphs.

    Raises ValueError for a batch over 4096.
    """
    batch = len(context_lens)
    if batch > MAX_BATCH:
        raise ValueError(f"context_lens must have at most {MAX_BATCH} rows, got {batch}")
    plan = torch.empty(ctas, RECORD, dtype=torch.int32, device=context_lens.device) if out is None else out
    _decode_plan_kernel[(ctas,)](
        context_lens,
        block_table,
        plan,
        batch,
        kv_heads,
        q_len,
        window or 0,
        min_tiles,
        0 if block_table is None else block_table.stride(0),
        PIECE_COST=piece_cost,
        DEEP=deep,
        FAN=FAN,
        PAGES=_PAGES,
        HAS_TABLE=block_table is not None,
        ALIGN=batch * kv_heads <= ctas,
        BLOCK_B=max(128, triton.next_power_of_2(batch)),
        CANDIDATES=_CANDIDATES,
        CANDIDATE_STEP=_CANDIDATE_STEP,
        num_warps=4,
    )
    return plan


@triton.jit
def visible_tiles(length, q_len, window):
    """First tile that a query of the row can see, and how many there are, at least one."""
    first = tl.where(window > 0, tl.maximum(length - q_len - window + 1, 0) // 64, 0)
    return first, tl.maximum((length + 63) // 64 - first, 1)


@triton.jit
def _divide_up(tiles, size):
    """ceil(tiles / size) of non-negative numbers below 2^20, without the slow integer division."""
    return tl.floor((tiles + size - 0.5) * (1.0 / size.to(tl.float32))).to(tl.int32)


@triton.jit
def _pieces(tiles, size, DEEP: tl.constexpr, FAN: tl.constexpr):
    """How many pieces of `size` tiles an item is cut into if they are more than FAN, else of DEEP tiles more."""
    pieces = _divide_up(tiles, size + DEEP)
    return tl.where(pieces > FAN, _divide_up(tiles, size), pieces)


@triton.jit(
    do_not_specialize=["batch", "kv_heads", "q_len", "window", "min_tiles", "table_stride"],
    do_not_specialize_on_alignment=["lens_ptr", "table_ptr"],
)
def _decode_plan_kernel(
    lens_ptr,
    table_ptr,
    plan_ptr,
    batch,
    kv_heads,
    q_len,
    window,
    min_tiles,
    table_stride,
    PIECE_COST: tl.constexpr,
    DEEP: tl.constexpr,
    FAN: tl.constexpr,
    PAGES: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_B: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CANDIDATE_STEP: tl.constexpr,
):
    cta = tl.program_id(0)
    ctas = tl.num_programs(0)
    row = tl.arange(0, BLOCK_B)
    real = row < batch
    length = tl.load(lens_ptr + row, mask=real, other=0)
    base, tiles = visible_tiles(length, q_len, window)
    cost = tl.where(real, tiles + PIECE_COST, 0) * kv_heads
    total_cost = tl.sum(cost, 0)
    interval = tl.maximum((total_cost + ctas - 1) // ctas, min_tiles + PIECE_COST)

    aligned = False
    if ALIGN:
        total_tiles = tl.sum(tl.where(real, tiles, 0), 0) * kv_heads
        ideal = (total_tiles + ctas - 1) // ctas
        step = tl.arange(0, CANDIDATES)
        size = tl.maximum(ideal - DEEP + (ideal * step + CANDIDATE_STEP - 1) // CANDIDATE_STEP, min_tiles)
        pieces_of = _pieces(tiles[None, :], size[:, None], DEEP, FAN)
        needed = tl.sum(tl.where(real[None, :], pieces_of, 0), 1) * kv_heads
        piece_size = tl.min(tl.where(needed <= ctas, size, interval + 1), 0)
        aligned = piece_size <= interval
        pieces = _pieces(tiles, piece_size, DEEP, FAN)
        cost = tl.where(aligned, tl.where(real, pieces * kv_heads, 0), cost)
        interval = tl.where(aligned, 1, interval)

    end = tl.cumsum(cost, 0)
    begin = cta * interval
    before = end <= begin
    my_row = tl.sum((before & real).to(tl.int32), 0)
    row_start = tl.sum(tl.where(before, cost, 0), 0)
    mine = row == my_row
    my_tiles = tl.sum(tl.where(mine, tiles, 0), 0)
    my_base = tl.sum(tl.where(mine, base, 0), 0)
    my_length = tl.sum(tl.where(mine, length, 0), 0)
    my_stored = (my_length + 63) // 64
    span = tl.maximum(tl.sum(tl.where(mine, cost, 0), 0) // kv_heads, 1)
    head = (begin - row_start) // span
    start = row_start + head * span
    stop = start + span

    first_cta = tl.where(aligned, start, (start + PIECE_COST) // interval)
    count = tl.where(aligned, span, (stop - 1) // interval - first_cta + 1)
    index = tl.maximum(cta - first_cta, 0)
    even, even_end = my_tiles * index // span, my_tiles * (index + 1) // span
    first = my_base + tl.where(aligned, even, tl.maximum(begin - start - PIECE_COST, 0))
    last = my_base + tl.where(aligned, even_end, tl.minimum(begin + interval, stop) - start - PIECE_COST)
    last = tl.minimum(last, my_stored)
    left = tl.where(aligned, 0, tl.maximum(begin + interval - stop, 0))

    record = plan_ptr + cta * 16
    tl.store(record + 0, my_row)
    tl.store(record + 1, head)
    tl.store(record + 2, first)
    tl.store(record + 3, last)
    tl.store(record + 4, index)
    tl.store(record + 5, count)
    tl.store(record + 6, left)
    tl.store(record + 7, interval)
    tl.store(record + 8, my_length)
    slot = tl.arange(0, PAGES)
    page = tl.full([PAGES], -1, tl.int32)
    if HAS_TABLE:
        at = table_ptr + my_row.to(tl.int64) * table_stride + first + slot
        page = tl.load(at, mask=(my_row < batch) & (first + slot < last), other=-1)
    tl.store(record + 9 + slot, page)


def decode_plan_static(
    context_lens: Tensor, kv_heads: int, splits: int, *, q_len: int = 1, window: int | None = None
) -> Tensor:
    """The plan that serving engines used before: every item in `splits` equal pieces, whatever its length.

    The baseline to measure `decode_plan` against.  int32 `[batch * kv_heads * splits, 16]`.
    """
    batch = len(context_lens)
    lens = context_lens.long()
    stored = (lens + TILE - 1) // TILE
    base = (lens - q_len - window + 1).clamp(min=0) // TILE if window else torch.zeros_like(lens)
    tiles = (stored - base).clamp(min=1)[:, None]
    count = tiles.clamp(max=splits)
    index = torch.arange(splits, device=lens.device)[None, :]
    row = torch.where(index < count, torch.arange(batch, device=lens.device)[:, None], batch)
    first, last = base[:, None] + tiles * index // count, base[:, None] + tiles * (index + 1) // count
    last = torch.minimum(last, stored[:, None])
    zero = torch.zeros_like(row)
    fields = [row, zero, first, last, index + zero, count + zero, zero, zero + 1, lens[:, None] + zero]
    fields += [zero - 1] * (RECORD - len(fields))
    plan = torch.stack(fields, dim=2)[:, None].repeat(1, kv_heads, 1, 1)
    plan[..., 1] = torch.arange(kv_heads, device=lens.device)[None, :, None]
    return plan.reshape(-1, RECORD).int()


def decode_plan_reference(
    context_lens: list[int],
    kv_heads: int,
    *,
    ctas: int,
    q_len: int = 1,
    window: int | None = None,
    min_tiles: int = MIN_TILES,
    piece_cost: int = PIECE_COST,
    deep: int = DEEP,
) -> list[list[Piece]]:
    """The pieces of every CTA, cut in plain Python; a row of length zero has one piece without tiles."""
    items = []
    for row, length in enumerate(context_lens):
        base = max(length - q_len - window + 1, 0) // TILE if window else 0
        items += [(row, head, base, max(-(-length // TILE) - base, 1)) for head in range(kv_heads)]
    interval = max(-(-sum(tiles + piece_cost for *_, tiles in items) // ctas), min_tiles + piece_cost)
    plan: list[list[Piece]] = [[] for _ in range(ctas)]

    def place(cta: int, item: tuple[int, int, int, int], begin: int, end: int, index: int, count: int) -> None:
        row, head, base, _ = item
        stored = -(-context_lens[row] // TILE)
        plan[cta].append(Piece(row, head, base + begin, min(base + end, stored), index, count))

    size = _aligned_size([tiles for *_, tiles in items], ctas, min_tiles, deep)
    if size is not None and size <= interval:
        cta = 0
        for item in items:
            tiles = item[3]
            count = _piece_count(tiles, size, deep)
            for index in range(count):
                place(cta, item, tiles * index // count, tiles * (index + 1) // count, index, count)
                cta += 1
        return plan

    position = 0
    for item in items:
        position += piece_cost
        cuts = [0]
        while cuts[-1] < item[3]:
            room = interval - (position + cuts[-1]) % interval
            cuts.append(min(cuts[-1] + room, item[3]))
        for index, (begin, end) in enumerate(itertools.pairwise(cuts)):
            place((position + begin) // interval, item, begin, end, index, len(cuts) - 1)
        position += item[3]
    return plan


def _piece_count(tiles: int, size: int, deep: int) -> int:
    """How many pieces of `size` tiles an item is cut into if they are more than FAN, else of `deep` tiles more."""
    count = -(-tiles // (size + deep))
    return -(-tiles // size) if count > FAN else count


def _aligned_size(tiles: list[int], ctas: int, min_tiles: int, deep: int) -> int | None:
    """The smallest candidate piece size with which one piece a CTA suffices, or None."""
    ideal = -(-sum(tiles) // ctas)
    for step in range(_CANDIDATES):
        size = max(ideal - deep - (-ideal * step // _CANDIDATE_STEP), min_tiles)
        if sum(_piece_count(n, size, deep) for n in tiles) <= ctas:
            return size
    return None
