"""Tile shapes by kind of operand and size of problem, measured by ``bench/kernels/gemm.py`` on the GPU named."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = [
    "BLOCK_DOWN_TILE",
    "BLOCK_UP_TILE",
    "DecodeTile",
    "FewTile",
    "NarrowTile",
    "UpTile",
    "WideTile",
    "decode_tile",
    "down_tile",
    "few_tokens_tile",
    "narrow_tile",
    "summed_at_once",
    "up_tile",
    "wide_tile",
]


_E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class WideTile:
    """One configuration of the wide kernel.

    block_m: rows of one consumer warpgroup's part of a tile.
    block_n: columns of a tile.
    piece: columns written at a time, a half or a quarter of `block_n`.
    staged: pieces a warpgroup may have on their way to memory.
    stages: stages of the ring, each 128 bytes of K deep.
    band: height, in tiles, of the band the tiles are taken in.
    warpgroups: consumers, 2 or 3.
    """

    block_m: int
    block_n: int
    piece: int
    staged: int
    stages: int
    band: int
    warpgroups: int = 2

    @property
    def tile_m(self) -> int:
        return self.block_m * self.warpgroups


# NVIDIA H200, triton 3.6.
_LARGE = WideTile(64, 256, 64, 2, 4, 8)
_FEW_TILES = WideTile(64, 128, 64, 1, 5, 8, 3)
_NARROW = WideTile(64, 128, 64, 2, 6, 8)


def wide_tile(m: int, n: int, *, promote: bool, blocks: bool = False) -> WideTile:
    """The tile for an ``[m, n]`` result; with scales of blocks, one that is a block wide."""
    if n <= 128:
        return _NARROW
    if blocks:
        return _FEW_TILES
    # Where tiles of 128 x 256 would leave SMs without one, smaller tiles reach more of them.
    if -(-m // 128) * -(-n // 256) < 2 * 132:
        return _FEW_TILES if promote else _NARROW
    return _LARGE


@dataclass(frozen=True)
class UpTile:
    """One configuration of the gate-up kernel for many tokens.

    tokens: rows of x in a tile, 128 or, without `promote`, 192.
    rows: interleaved gate and up rows a consumer warpgroup.
    """

    tokens: int
    rows: int
    warpgroups: int
    stages: int
    promote: bool
    consumer_registers: int
    producer_registers: int

    @property
    def extra(self) -> int:
        """Tokens past the first 128, which have an accumulator of their own."""
        return self.tokens - 128


@dataclass(frozen=True)
class DecodeTile:
    """One configuration of the single-launch decode kernel; fields as `UpTile`'s."""

    tokens: int
    rows: int
    warpgroups: int
    stages: int
    promote: bool


@dataclass(frozen=True)
class FewTile:
    """One configuration of the kernel for the fewest tokens: 64 weight rows by one row of x, padded to 8.

    ctas: of them on an SM; two need 11 stages or fewer.
    """

    stages: int
    promote: bool
    tokens: int = 8
    rows: int = 64
    ctas: int = 1


def up_tile(rows: float, intermediate: int, hidden: int, dtype: torch.dtype) -> UpTile:
    """The gate-up tile for experts of this width that see `rows` rows each: three warpgroups where 192 rows divide the
    expert's, else two.

    With rows enough, and unless `down_tile` cannot follow, tiles have 192 tokens. Their accumulator is the tensor
    cores' own: h is rounded to e4m3 next, which costs ten times what the short accumulator does.
    """
    promote = dtype == _E4M3
    if intermediate % 96:
        return UpTile(128, 64, 2, 6, promote, 216, 56)
    if hidden % 256 or rows <= 128:
        return UpTile(128, 64, 3, 5, promote, 152, 56)
    return UpTile(192, 64, 3, 4, False, 152, 56)


# With scales of blocks, which leave fewer registers.
BLOCK_UP_TILE = UpTile(128, 64, 2, 6, True, 216, 56)
BLOCK_DOWN_TILE = WideTile(64, 128, 64, 2, 6, 1)


def down_tile(hidden: int, tokens: int) -> WideTile:
    """The down tile: rows as many as the gate-up tile has tokens, columns that divide the hidden size."""
    if tokens == 192:
        return WideTile(64, 256, 64, 2, 3, 1, 3)
    return WideTile(64, 256, 64, 4, 3, 1) if hidden % 256 == 0 else WideTile(64, 128, 64, 2, 6, 1)


def summed_at_once(tokens: int) -> int:
    """Tokens of a piece of the sum inside a kernel: more have more loads in flight, fewer give every warpgroup one."""
    return 4 if tokens <= 64 else 8


# Up to so many pairs, of narrow experts twice as many, every pair is a tile of its own: making a plan would take longer
# than reading an expert twice. Narrow is what has up to so many gate-up tiles.
_UNPLANNED_PAIRS, _UNPLANNED_TILES = 24, 288
_SMS = 132


def few_tokens_tile(pairs: int, experts: int, intermediate: int, dtype: torch.dtype) -> FewTile | None:
    """The tile for batches whose pairs hardly share an expert, or None for larger ones."""
    tiles = pairs * intermediate // 32
    most = 2 * _UNPLANNED_PAIRS if tiles <= _UNPLANNED_TILES else _UNPLANNED_PAIRS
    if pairs > min(most, experts):
        return None
    # Half an SM's shared memory: where tiles are more than SMs, two CTAs share one; else the next layer's kernel sets
    # itself up there meanwhile.
    return FewTile(11, dtype == _E4M3, ctas=2 if _SMS < tiles <= 2 * _SMS else 1)


# Rows an expert up to which a tile is best: tokens, stages.
_DECODE = {3: (8, 11), 8: (16, 10), 24: (32, 9), 48: (64, 8), 96: (128, 6)}
# Narrower experts go to the grouped GEMMs sooner.
_WIDE_EXPERT = 512


def decode_tile(
    pairs: int, experts: int, intermediate: int, dtype: torch.dtype, *, of_blocks: bool = False
) -> DecodeTile | None:
    """The decode tile for this many routed rows, or None where the grouped GEMMs are faster."""
    rows = pairs / experts
    for most, (tokens, stages) in _DECODE.items():
        # Scales of blocks leave no registers for 128 tokens.
        if rows <= most and (tokens <= 64 or (intermediate >= _WIDE_EXPERT and not of_blocks)):
            return DecodeTile(tokens, 64, 2, stages, dtype == _E4M3)
    return None


@dataclass(frozen=True)
class NarrowTile:
    """One configuration of the kernel for few rows.

    tokens: rows of x it takes, the columns of its wgmma.
    """

    tokens: int
    warpgroups: int
    stages: int


# A CTA keeps to half of an SM's shared memory, see `narrow_kernel`.
_FEW_ROWS = [NarrowTile(8, 1, 11), NarrowTile(16, 1, 10), NarrowTile(32, 1, 8), NarrowTile(64, 1, 5)]


def narrow_tile(m: int) -> NarrowTile | None:
    """The tile for `m` rows, or None where the wide kernel is faster."""
    if m > 64:
        return None
    return next(tile for tile in _FEW_ROWS if m <= tile.tokens)
