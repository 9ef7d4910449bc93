"""Orders the query tiles of a ragged prefill batch, heaviest first, for the persistent prefill kernel.

A tile is 128 new tokens of one row; what it costs grows with the position of its last token.  Dealt in descending
order, back and forth over the CTAs, the tiles of any mix of chunks finish together.  No sort is needed: within a row
the costs rise by a constant step, so how many tiles of each row are heavier than a given one is one division, and each
program of the planner ranks its own tile.  `prefill_plan_reference` sorts instead.

A plan is int32 `[1 + tiles, 8]`: first the number of tiles, then per tile its row, first query and end of the row's
queries in the batch, position of the first query in its context, and the row's context length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["QUERY_TILE", "prefill_plan", "prefill_plan_reference"]

QUERY_TILE = 128


def prefill_plan(context_lens: Tensor, cu_q_lens: Tensor, tokens: int, *, out: Tensor | None = None) -> Tensor:
    """Plan a batch of `tokens` new tokens; one launch serves every layer of the step.

    `context_lens` int32 `[batch]` counts the new tokens too, `cu_q_lens` int32 `[batch + 1]` says where each row's
    begin.
    """
    batch = len(context_lens)
    most = -(-tokens // QUERY_TILE) + batch
    plan = torch.empty(1 + most, 8, dtype=torch.int32, device=context_lens.device) if out is None else out
    _prefill_plan_kernel[(most,)](
        context_lens,
        cu_q_lens,
        plan,
        batch,
        TILE=QUERY_TILE,
        BLOCK_B=max(32, triton.next_power_of_2(batch)),
        num_warps=1 if batch <= 256 else 4,
    )
    return plan


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["lens_ptr", "cu_ptr"])
def _prefill_plan_kernel(lens_ptr, cu_ptr, plan_ptr, batch, TILE: tl.constexpr, BLOCK_B: tl.constexpr):
    me = tl.program_id(0)
    row = tl.arange(0, BLOCK_B)
    real = row < batch
    begin = tl.load(cu_ptr + row, mask=real, other=0)
    end = tl.load(cu_ptr + row + 1, mask=real, other=0)
    length = tl.load(lens_ptr + row, mask=real, other=0)
    tiles = (end - begin + TILE - 1) // TILE
    position = length - (end - begin)
    through = tl.cumsum(tiles, 0)
    if me == 0:
        tl.store(plan_ptr, tl.sum(tiles, 0))
    if me < tl.sum(tiles, 0):
        my_row = tl.sum((real & (through <= me)).to(tl.int32), 0)
        mine = row == my_row
        tile = me - tl.sum(tl.where(mine, through - tiles, 0), 0)
        my_begin = tl.sum(tl.where(mine, begin, 0), 0)
        my_position = tl.sum(tl.where(mine, position, 0), 0) + tile * TILE
        reach = my_position - position
        not_heavier = tl.minimum(tl.maximum(reach // TILE + 1, 0), tiles)
        not_heavier = tl.where(reach < 0, 0, not_heavier)
        equal = (reach >= 0) & (reach % TILE == 0) & (reach // TILE < tiles)
        rank = tl.sum(tl.where(real, tiles - not_heavier, 0), 0)
        rank += tl.sum((equal & (row < my_row)).to(tl.int32), 0)
        record = plan_ptr + (1 + rank) * 8
        tl.store(record + 0, my_row)
        tl.store(record + 1, my_begin + tile * TILE)
        tl.store(record + 2, tl.sum(tl.where(mine, end, 0), 0))
        tl.store(record + 3, my_position)
        tl.store(record + 4, tl.sum(tl.where(mine, length, 0), 0))


def prefill_plan_reference(context_lens: list[int], cu_q_lens: list[int]) -> list[tuple[int, int, int, int, int]]:
    """The records of a plan, heaviest tile first, ties by row."""
    records = []
    for row, (length, begin, end) in enumerate(zip(context_lens, cu_q_lens, cu_q_lens[1:], strict=False)):
        firsts = range(begin, end, QUERY_TILE)
        records += [(row, first, end, length - (end - first), length) for first in firsts]
    return sorted(records, key=lambda record: (-record[3], record[0]))
