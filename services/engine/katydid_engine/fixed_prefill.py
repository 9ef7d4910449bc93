"""The plan of a chunk's attention in memory that never moves, as a captured graph reads it.

A graph holds numbers of tiles, pieces and blocks as they were when it was captured. So there is room for the most that
a chunk of its size can have; what is over repeats work whose result nobody reads, and the selection counts blocks up to
the longest context, of which a tile never takes those behind its own.

Tokens behind a chunk that is shorter than its graph have tiles of their own, which keep one block: what the chunk's own
tiles select is what they would select without them.

Chunks that attend to everything are planned so as well. They have few tiles, and behind a long context an SM each would
be busy with these when the others are long done; here lists of blocks are cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from katydid_kernels import SparsePlan, StemRule, sparse_plan
from katydid_kernels.stem_select.budget import BLOCK
from katydid_kernels.stem_select.plan import PIECE_FIELDS, SparseRow
from torch import Tensor

from katydid_engine.host_copies import to_device

__all__ = ["FixedPrefill"]

_RECORD, _CUT = 8, 4
_Rows = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
# Pieces beyond one a tile are at most half a device's SMs times a head's share, with what rounding adds.
_MORE_PIECES = 288


class FixedPrefill:
    """Of chunks that take ``chunk`` tokens of a graph, with contexts of at most ``longest`` tokens. They keep blocks by
    ``rule``, or all without one.

    Attributes:
        plan: what attention is given; the same object always.
    """

    def __init__(self, rule: StemRule | None, chunk: int, longest: int, heads: int, device: torch.device) -> None:
        self._rule, self._chunk, self._heads = rule, chunk, heads
        # A chunk may begin within a block, and so what is over behind it.
        self._tiles = -(-chunk // BLOCK) + 2
        # Each table begins on a border of 16 bytes, as kernels are compiled for.
        self._pieces = -(-(self._tiles + _MORE_PIECES // heads) // 4) * 4
        sizes = (self._tiles * _RECORD, self._pieces * PIECE_FIELDS, self._tiles * _CUT)
        self._memory = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        in_order, pieces, cuts = (
            self._memory[:end][-size:] for size, end in zip(sizes, accumulate(sizes), strict=True)
        )
        blocks = -(-longest // BLOCK)
        self.plan = SparsePlan(
            in_order=in_order.view(-1, _RECORD),
            pieces=pieces.view(-1, PIECE_FIELDS),
            cuts=cuts.view(-1, _CUT),
            partials=self._pieces + 1,
            most=blocks,
            sparse_rows=() if rule is None else (SparseRow(0, 0, self._tiles, longest, blocks),),
            rule=rule or StemRule(),
        )

    def fill(self, new: int, end: int, prompt: int | None) -> None:
        """Plans a chunk of ``new`` tokens, the last of ``end``, of a prompt of ``prompt`` tokens, None without a rule.
        Raises ValueError for more than there is room for, and for less than a block of context for tokens that are
        over: what lies in slots that nothing wrote may be no number."""
        if new < self._chunk and end < BLOCK:
            raise ValueError(f"a context of {end} tokens: expected at least {BLOCK} where a chunk is padded")
        own = sparse_plan(self.plan.rule, [new], [end], [prompt if self._rule else None], heads=self._heads)
        in_order, pieces, cuts = (table.numpy() for table in (own.in_order, own.pieces, own.cuts))
        over = _one_block_each(new, self._chunk, end, len(in_order))
        pieces = np.concatenate((pieces, np.insert(over[:, :7], 7, [[0], [-1]], axis=1)))
        in_order = np.concatenate((in_order, over))
        in_order[:, 7] = 0 if self._rule else -1
        # One block of the first tile, whose result goes where nobody looks.
        spare = [*in_order[0, :5], 1, 0, 0, self._pieces]
        tables = (
            _filled(in_order, self._tiles, in_order[0]),
            _filled(pieces, self._pieces, spare),
            _filled(cuts, self._tiles, [0] * _CUT),
        )
        packed = torch.from_numpy(np.concatenate([table.ravel() for table in tables]))
        self._memory.copy_(to_device(packed, self._memory.device))

    def all_blocks(self) -> Tensor:
        """Without a rule, the list of each tile: int32 ``[tiles, heads, blocks]``, as ``stem_select`` has it."""
        newest = self.plan.in_order[:, 3] // BLOCK
        back = torch.arange(self.plan.most, dtype=torch.int32, device=newest.device)
        lists = (newest[:, None] - back).clamp_(min=0)
        return lists[:, None].expand(-1, self._heads, -1).contiguous()


def _one_block_each(first: int, last: int, length: int, tile: int) -> _Rows:
    """Records, from ``tile`` on, of tokens that are over: they attend to the last block that the context fills."""
    borders = [*range(first, last, BLOCK), last] if first < last else []
    position = (length // BLOCK - 1) * BLOCK
    records = [
        [0, begin, end, position, length, 1, tile + index, 0] for index, (begin, end) in enumerate(pairwise(borders))
    ]
    return np.array(records, dtype=np.int32).reshape(-1, _RECORD)


def _filled(table: _Rows, rows: int, spare: Sequence[int] | _Rows) -> _Rows:
    """With copies of a row behind it, ``rows`` in all."""
    if len(table) > rows:
        raise ValueError(f"{len(table)} rows of a sparse plan: there is room for {rows}")
    return np.concatenate((table, np.tile(np.asarray(spare, dtype=np.int32), (rows - len(table), 1))))
