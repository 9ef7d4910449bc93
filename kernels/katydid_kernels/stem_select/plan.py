"""The query tiles of a batch for sparse prefill and the pieces they are dealt in, from lengths that the host knows.

A tile is what a chunk has of one block of 128 positions. What it costs is how many blocks it keeps, which the budget
says beforehand; so one order serves all layers and heads, and no device has to count. A list that would keep an SM busy
long after the others, as those at a prompt's end do, is cut into pieces, whose results are combined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from katydid_kernels.stem_select.budget import BLOCK, StemRule, kept_blocks

__all__ = ["PIECE_FIELDS", "SparsePlan", "SparseRow", "sparse_plan"]

PIECE_FIELDS = 9
# A piece costs about two blocks more than its blocks, and its result is written, read and summed.
_LEAST_PIECE = 16
_SMS = 132


@dataclass(frozen=True, slots=True)
class SparseRow:
    """A row of the batch that is selected for: its tiles from ``first_tile`` on, its context and the blocks of it."""

    row: int
    first_tile: int
    tiles: int
    length: int
    blocks: int


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """The tiles of one prefill batch.

    Attributes:
        in_order: int32 ``[tiles, 8]``, in the order of the queries: row, first query, end of the tile's queries,
            position of the first query, context length of the row, blocks kept, the tile's index here, index of the
            row among ``sparse_rows`` or -1.
        pieces: int32 ``[pieces, 9]``, heaviest first: as there, but for blocks of the piece, and then where the piece
            begins in the tile's list and where its result goes among ``partials``, -1 for a whole tile.
        cuts: int32 ``[tiles cut, 4]``: first of the tile's partial results, how many, first query and end.
        partials: results of pieces that are no whole tile.
        most: the longest list of blocks.
        sparse_rows: the rows that do not keep everything.
        rule: what they keep by.
    """

    in_order: Tensor
    pieces: Tensor
    cuts: Tensor
    partials: int
    most: int
    sparse_rows: tuple[SparseRow, ...]
    rule: StemRule

    @property
    def tiles(self) -> int:
        return len(self.in_order)


def sparse_plan(
    rule: StemRule,
    q_lens: Sequence[int],
    context_lens: Sequence[int],
    prompt_lens: Sequence[int | None],
    device: torch.device | str = "cpu",
    *,
    heads: int = 8,
) -> SparsePlan:
    """Plans rows of ``q_lens`` new tokens that end at ``context_lens``.

    Args:
        prompt_lens: how long each whole prompt is, of which the row brings a chunk; None for a row that keeps every
            block. So do blocks behind the prompt: tokens that were decoded once and are computed again.
        heads: query heads that will attend: with more of them less is cut.
    """
    records: list[list[int]] = []
    sparse_rows: list[SparseRow] = []
    begin = 0
    for row, (new, length, prompt) in enumerate(zip(q_lens, context_lens, prompt_lens, strict=True)):
        kept = None if prompt is None else kept_blocks(rule, prompt)
        position, end, first_tile = length - new, begin + new, len(records)
        while begin < end:
            block = position // BLOCK
            stop = min(end, begin + (block + 1) * BLOCK - position)
            count = block + 1 if kept is None or block >= len(kept) else kept[block]
            records.append([row, begin, stop, position, length, count, len(records), -1])
            position += stop - begin
            begin = stop
        tiles = records[first_tile:]
        if any(record[5] <= record[3] // BLOCK for record in tiles):
            for record in tiles:
                record[7] = len(sparse_rows)
            sparse_rows.append(SparseRow(row, first_tile, len(tiles), length, -(-length // BLOCK)))
    pieces, cuts, partials = _pieces(records, heads)

    def tensor(rows: list[list[int]], width: int) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32).reshape(-1, width).to(device, non_blocking=True)

    most = max((record[5] for record in records), default=0)
    dealt = tensor(pieces, PIECE_FIELDS), tensor(cuts, 4), partials
    return SparsePlan(tensor(records, 8), *dealt, most, tuple(sparse_rows), rule)


def _pieces(records: list[list[int]], heads: int) -> tuple[list[list[int]], list[list[int]], int]:
    """Pieces of at most half an SM's share of the work, heaviest first; the tiles that were cut; their pieces.

    Half: dealt back and forth in that order, SMs then end within a few per cent of each other.
    """
    longest = max(_LEAST_PIECE, sum(record[5] for record in records) * heads // (2 * _SMS))
    pieces, cuts, partials = [], [], 0
    for record in records:
        row, begin, stop, position, length, count, tile, _ = record
        parts = -(-count // longest)
        if parts > 1:
            cuts.append([partials, parts, begin, stop])
        for part in range(parts):
            first, end = count * part // parts, count * (part + 1) // parts
            slot = partials + part if parts > 1 else -1
            pieces.append([row, begin, stop, position, length, end - first, tile, first, slot])
        partials += parts if parts > 1 else 0
    pieces.sort(key=lambda piece: (-piece[5], piece[6]))
    return pieces, cuts, partials
