"""Tile shapes of the W4A8 kernels, measured by ``bench/kernels/w4a8.py`` on the GPU named."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DecodeTile", "NarrowTile", "decode_tile", "narrow_tile"]


@dataclass(frozen=True)
class NarrowTile:
    """One configuration of the kernel for few rows.

    tokens: rows of x it takes, the columns of its wgmma.
    stages: stages of the ring, 256 columns deep; the CTA must stay under half of an SM's shared memory.
    """

    tokens: int
    stages: int


# NVIDIA H200, triton 3.6.
_NARROW = [NarrowTile(8, 10), NarrowTile(16, 8), NarrowTile(32, 6), NarrowTile(64, 4)]


def narrow_tile(m: int) -> NarrowTile | None:
    """The tile for `m` rows, or None where the grouped kernel is faster."""
    return next((tile for tile in _NARROW if m <= tile.tokens), None)


@dataclass(frozen=True)
class DecodeTile:
    """One configuration of the single-launch kernel of experts.

    tokens: rows of x in a tile.
    stages: stages of the ring, 256 columns deep.
    """

    tokens: int
    stages: int


_DECODE = [DecodeTile(8, 11), DecodeTile(16, 10), DecodeTile(32, 8), DecodeTile(64, 6)]


def decode_tile(pairs: int, experts: int) -> DecodeTile:
    """The tile for this many routed rows."""
    mean = pairs / experts
    if pairs <= 48 or mean <= 3:
        return _DECODE[0]
    return _DECODE[1] if mean <= 8 else _DECODE[2] if mean <= 20 else _DECODE[3]
