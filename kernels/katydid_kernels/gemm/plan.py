"""Sorts the (token, choice) pairs of routed experts by expert and cuts each expert's rows into tiles, on the device.

The grouped GEMMs read token rows through `rows`, so nothing is gathered; `slots` leads each pair back to its row for
the weighted sum. Few pairs (decode) take one launch of one CTA. Many take two: every CTA counts its chunk and takes a
range of each expert's rows with one atomic an expert, the last CTA places the experts, and in the second launch every
pair claims a row of its chunk's range with an atomic that few others want. Rows of one expert come in no particular
order, which no result depends on: a row's product is the same wherever it stands.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["PLAN_FIELDS", "PlacedPairs", "RoutePlan", "max_tiles", "plan_routes", "plan_routes_reference"]

PLAN_FIELDS = 4
SINGLE_LAUNCH_PAIRS = 4096
SMALLEST_TILE = 8
CHUNK_PAIRS = 1024


@dataclass(frozen=True)
class RoutePlan:
    """Where the pairs of one batch went, in tensors made once for batches of up to T tokens.

    rows: int32 ``[T * top_k]``: the token of sorted row r; rows past the local pairs are not written.
    slots: int32 ``[T, top_k]``: the sorted row of each pair, -1 where the expert is not local.
    tiles: int32 ``[max_tiles, 4]``: expert, first row, end of the expert's rows, 0.
    tile_count: int32 ``[1]``: how many tiles are in use.
    scratch: int32, zero between calls.
    bases: int32 ``[T * top_k / 1024, experts]``: the next row of a chunk within each expert's.
    """

    rows: Tensor
    slots: Tensor
    tiles: Tensor
    tile_count: Tensor
    scratch: Tensor
    bases: Tensor

    @staticmethod
    def allocate(tokens: int, top_k: int, experts: int, device: torch.device | str) -> RoutePlan:
        """A plan's memory for batches of up to `tokens` tokens."""
        pairs = tokens * top_k
        return RoutePlan(
            torch.empty(pairs, dtype=torch.int32, device=device),
            torch.empty(tokens, top_k, dtype=torch.int32, device=device),
            torch.zeros(max_tiles(pairs, experts, SMALLEST_TILE), PLAN_FIELDS, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.zeros(2 * experts + 1, dtype=torch.int32, device=device),
            torch.empty(triton.cdiv(pairs, CHUNK_PAIRS), experts, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class PlacedPairs:
    """A plan that whoever chooses the experts is to fill, and how: see `plan_routes`."""

    plan: RoutePlan
    experts: int
    tile_rows: int
    first_expert: int = 0

    def place(self, topk_ids: Tensor) -> None:
        """Fills it by a launch of its own."""
        plan_routes(topk_ids, self.plan, self.experts, self.tile_rows, first_expert=self.first_expert)


def max_tiles(pairs: int, experts: int, tile_rows: int) -> int:
    """Most tiles `pairs` rows can need: a full tile for every `tile_rows` pairs, and one ragged tile an expert."""
    return max(1, pairs // tile_rows + min(pairs, experts))


def plan_routes(topk_ids: Tensor, plan: RoutePlan, experts: int, tile_rows: int, *, first_expert: int = 0) -> RoutePlan:
    """Fill `plan` from int32 ``topk_ids[T, top_k]``, in tiles of `tile_rows` (8 or more) rows.

    Ids outside ``first_expert + [0, experts)`` are skipped.
    """
    pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    block_e = max(32, triton.next_power_of_2(experts))
    early = topk_ids.is_cuda
    if pairs <= SINGLE_LAUNCH_PAIRS:
        block = max(32, triton.next_power_of_2(pairs))
        _place_few_kernel[(1,)](
            topk_ids, plan.scratch, plan.rows, plan.slots, plan.tiles, plan.tile_count,
            pairs, top_k, first_expert, experts,
            TILE=tile_rows, BLOCK=block, BLOCK_E=block_e, EARLY=early,
            # A warp scans without a barrier: few pairs are placed soonest by one.
            num_warps=1 if pairs <= 256 else 8, launch_pdl=early,
        )  # fmt: skip
        return plan
    chunks = triton.cdiv(pairs, CHUNK_PAIRS)
    _place_many_kernel[(chunks,)](
        topk_ids, plan.scratch, plan.bases, plan.tiles, plan.tile_count, pairs, first_expert, experts,
        TILE=tile_rows, BLOCK=CHUNK_PAIRS, BLOCK_E=block_e, EARLY=early, num_warps=8, launch_pdl=early,
    )  # fmt: skip
    _claim_kernel[(chunks,)](
        topk_ids, plan.scratch, plan.bases, plan.rows, plan.slots, pairs, top_k, first_expert, experts,
        BLOCK=CHUNK_PAIRS, EARLY=early, num_warps=8, launch_pdl=early,
    )  # fmt: skip
    return plan


@triton.jit
def _local_expert(ids_ptr, pair, pairs, first_expert, experts):
    expert = tl.load(ids_ptr + pair, mask=pair < pairs, other=-1) - first_expert
    return expert, (pair < pairs) & (expert >= 0) & (expert < experts)


@triton.jit
def _lay_out(
    counts, experts, bins, starts_ptr, tiles_ptr, tile_count_ptr, TILE: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """Experts one after the other: the first row of each, and the tiles its rows are cut into, AT_ONCE of them at a
    time."""
    end = tl.cumsum(counts, 0)
    start = end - counts
    tl.store(starts_ptr + bins, start, mask=bins < experts)
    tiles = (counts + TILE - 1) // TILE
    first_tile = tl.cumsum(tiles, 0) - tiles
    tl.store(tile_count_ptr, tl.sum(tiles, 0))
    for first in range(0, tl.max(tiles, 0), AT_ONCE):
        i = first + tl.arange(0, AT_ONCE)[None, :]
        entry = tiles_ptr + (first_tile[:, None] + i) * 4
        there = i < tiles[:, None]
        tl.store(entry, bins[:, None] + 0 * i, mask=there)
        tl.store(entry + 1, start[:, None] + i * TILE, mask=there)
        tl.store(entry + 2, end[:, None] + 0 * i, mask=there)


@triton.jit
def _place_few_kernel(
    ids_ptr, scratch_ptr, rows_ptr, slots_ptr, tiles_ptr, tile_count_ptr, pairs, top_k, first_expert, experts,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        # The experts' kernel may set itself up meanwhile; it waits for this grid before it reads the plan.
        gdc_launch_dependents()
        gdc_wait()
    starts_ptr = scratch_ptr + experts
    bins = tl.arange(0, BLOCK_E)
    pair = tl.arange(0, BLOCK)
    expert, valid = _local_expert(ids_ptr, pair, pairs, first_expert, experts)
    # Counting an expert's pairs ranks them too.
    rank = tl.atomic_add(scratch_ptr + expert, 1, mask=valid, sem="relaxed")
    tl.debug_barrier()
    counts = tl.atomic_xchg(scratch_ptr + bins, 0, mask=bins < experts, sem="relaxed")
    counts = tl.where(bins < experts, counts, 0)
    _lay_out(counts, experts, bins, starts_ptr, tiles_ptr, tile_count_ptr, TILE, 1)
    tl.debug_barrier()
    slot = tl.load(starts_ptr + expert, mask=valid, other=0) + rank
    tl.store(rows_ptr + slot, pair // top_k, mask=valid)
    tl.store(slots_ptr + pair, tl.where(valid, slot, -1), mask=pair < pairs)


@triton.jit
def _place_many_kernel(
    ids_ptr, scratch_ptr, bases_ptr, tiles_ptr, tile_count_ptr, pairs, first_expert, experts,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    arrivals_ptr = scratch_ptr + 2 * experts
    bins = tl.arange(0, BLOCK_E)
    chunk = tl.program_id(0)
    expert, valid = _local_expert(ids_ptr, chunk * BLOCK + tl.arange(0, BLOCK), pairs, first_expert, experts)
    counts = tl.histogram(tl.where(valid, expert, 0), BLOCK_E, mask=valid)
    base = tl.atomic_add(scratch_ptr + bins, counts, mask=(bins < experts) & (counts > 0), sem="relaxed")
    tl.store(bases_ptr + chunk.to(tl.int64) * experts + bins, base, mask=bins < experts)
    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        counts = tl.atomic_xchg(scratch_ptr + bins, 0, mask=bins < experts, sem="relaxed")
        counts = tl.where(bins < experts, counts, 0)
        tl.store(arrivals_ptr, 0)
        _lay_out(counts, experts, bins, scratch_ptr + experts, tiles_ptr, tile_count_ptr, TILE, 8)


@triton.jit
def _claim_kernel(
    ids_ptr, scratch_ptr, bases_ptr, rows_ptr, slots_ptr, pairs, top_k, first_expert, experts,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    pair = chunk * BLOCK + tl.arange(0, BLOCK)
    expert, valid = _local_expert(ids_ptr, pair, pairs, first_expert, experts)
    start = tl.load(scratch_ptr + experts + expert, mask=valid, other=0)
    slot = start + tl.atomic_add(bases_ptr + chunk.to(tl.int64) * experts + expert, 1, mask=valid, sem="relaxed")
    tl.store(rows_ptr + slot, pair // top_k, mask=valid)
    tl.store(slots_ptr + pair, tl.where(valid, slot, -1), mask=pair < pairs)


def plan_routes_reference(topk_ids: Tensor, experts: int, tile_rows: int, *, first_expert: int = 0) -> RoutePlan:
    """The same plan in torch, rows of one expert in the order of their pairs."""
    local = topk_ids.flatten().long() - first_expert
    key = torch.where((local >= 0) & (local < experts), local, experts)
    order = torch.argsort(key, stable=True)[: int((key < experts).sum())]
    slots = torch.full_like(local, -1)
    slots[order] = torch.arange(len(order), device=order.device)
    tiles, start = [], 0
    for expert, count in enumerate(torch.bincount(key, minlength=experts + 1)[:experts].tolist()):
        tiles += [(expert, row, start + count, 0) for row in range(start, start + count, tile_rows)]
        start += count
    return RoutePlan(
        (order // topk_ids.shape[1]).int(),
        slots.view(topk_ids.shape).int(),
        torch.tensor(tiles, dtype=torch.int32, device=topk_ids.device).view(-1, PLAN_FIELDS),
        torch.tensor([len(tiles)], dtype=torch.int32, device=topk_ids.device),
        torch.empty(0, dtype=torch.int32, device=topk_ids.device),
        torch.empty(0, dtype=torch.int32, device=topk_ids.device),
    )
