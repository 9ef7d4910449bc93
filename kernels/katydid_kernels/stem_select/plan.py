"""The query tiles of a batch for sparse prefill, heaviest first, made on the host from lengths it knows.

A tile is what a chunk has of one block of 128 positions. What it costs is how many blocks it keeps, which the budget
says beforehand; so one order serves all layers and heads, and no device has to count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from katydid_kernels.stem_select.budget import BLOCK, StemRule, kept_blocks

__all__ = ["SparsePlan", "SparseRow", "sparse_plan"]


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
        records: int32 ``[tiles, 8]``, heaviest first: row, first query, end of the tile's queries, position of the
            first query, context length of the row, blocks kept, index of the tile in the order of the queries, index
            of the row among ``sparse_rows`` or -1.
        in_order: int32 ``[tiles, 8]``, the same in the order of the queries.
        most: the longest list of blocks.
        sparse_rows: the rows that do not keep everything.
        rule: what they keep by.
    """

    records: Tensor
    in_order: Tensor
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
) -> SparsePlan:
    """Plans rows of ``q_lens`` new tokens that end at ``context_lens``.

    Args:
        prompt_lens: how long each whole prompt is, of which the row brings a chunk; None for a row that keeps every
            block. So do blocks behind the prompt: tokens that were decoded once and are computed again.
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
    by_weight = sorted(records, key=lambda record: (-record[5], record[6]))

    def tensor(rows: list[list[int]]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32).reshape(-1, 8).to(device, non_blocking=True)

    most = max((record[5] for record in records), default=0)
    return SparsePlan(tensor(by_weight), tensor(records), most, tuple(sparse_rows), rule)
