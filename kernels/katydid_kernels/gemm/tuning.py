"""Tile shapes by kind of operand and size of problem, measured by ``bench/kernels/gemm.py`` on the GPU named."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = [
    "DecodeTile",
    "NarrowTile",
    "UpTile",
    "WideTile",
    "decode_tile",
    "down_tile",
    "narrow_tile",
    "up_tile",
    "wide_tile",
]


@dataclass(frozen=True)
class WideTile:
    """One configuration of the wide kernel.

    block_m: rows of one consumer warpgroup's part of a tile.
    block_n: columns of a tile.
    piece: columns written at a time, a half or a quarter of `block_n`.
    stages: stages of the ring, each 128 bytes of K deep.
    band: height, in tiles, of the band the tiles are taken in.
    warpgroups: consumers, 2 or 3.
    pingpong: the warpgroups take turns at whole tiles instead of sharing each.
    """

    block_m: int
    block_n: int
    piece: int
    stages: int
    band: int
    warpgroups: int = 2
    pingpong: bool = False

    @property
    def tile_m(self) -> int:
        return self.block_m if self.pingpong else self.warpgroups * self.block_m


# NVIDIA H200, triton 3.6.
_COOPERATIVE = WideTile(64, 256, 64, 4, 8)
_NARROW = WideTile(64, 128, 64, 6, 8)


def wide_tile(m: int, n: int, *, promote: bool) -> WideTile:
    """The tile for an ``[m, n]`` result."""
    del m, promote
    return _COOPERATIVE if n > 128 else _NARROW


@dataclass(frozen=True)
class UpTile:
    """One configuration of the gate-up kernel for many tokens.

    tokens: rows of x in a tile.
    rows: interleaved gate and up rows a consumer warpgroup.
    """

    tokens: int
    rows: int
    warpgroups: int
    stages: int
    promote: bool
    consumer_registers: int
    producer_registers: int


@dataclass(frozen=True)
class DecodeTile:
    """One configuration of the single-launch decode kernel.

    exchange: down tiles that take as long as one gate-up tile.
    """

    tokens: int
    rows: int
    warpgroups: int
    stages: int
    promote: bool
    exchange: int = 16


def up_tile(intermediate: int, dtype: torch.dtype) -> UpTile:
    """The gate-up tile for experts of this width: three warpgroups where 192 rows divide the expert's, else two."""
    promote = dtype == torch.float8_e4m3fn
    if intermediate % 96 == 0:
        return UpTile(128, 64, 3, 5, promote, 152, 40)
    return UpTile(128, 64, 2, 6, promote, 216, 56)


def down_tile(dtype: torch.dtype) -> WideTile:
    """The down tile: rows as many as the gate-up tile has tokens."""
    del dtype
    return WideTile(64, 256, 64, 4, 1)


def decode_tile(pairs: int, experts: int, intermediate: int, dtype: torch.dtype) -> DecodeTile | None:
    """The decode tile for this many routed rows, or None where the grouped GEMMs are faster."""
    del intermediate
    promote = dtype == torch.float8_e4m3fn
    mean = pairs / experts
    if mean > 48:
        return None
    if mean <= 2:
        return DecodeTile(8, 64, 2, 10, promote)
    if mean <= 8:
        return DecodeTile(16, 64, 2, 10, promote)
    return DecodeTile(32 if mean <= 20 else 64, 64, 2, 8, promote)


@dataclass(frozen=True)
class NarrowTile:
    """One configuration of the kernel for few rows.

    tokens: rows of x it takes, the columns of its wgmma.
    """

    tokens: int
    warpgroups: int
    stages: int


def narrow_tile(m: int) -> NarrowTile | None:
    """The tile for `m` rows, or None where the wide kernel is faster."""
    if m > 64:
        return None
    tokens = next(size for size in (8, 16, 32, 64) if m <= size)
    return NarrowTile(tokens, 2, 8 if tokens == 64 else 10)
