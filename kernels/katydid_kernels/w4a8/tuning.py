"""Tile shapes of the W4A8 kernels, measured by ``bench/kernels/w4a8.py`` on the GPU named."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from katydid_kernels.w4a8.packing import Int4Weight

__all__ = [
    "FEW_EXPERTS_TILE",
    "DecodeTile",
    "FewTile",
    "GroupedTile",
    "NarrowTile",
    "expert_tile",
    "few_tile",
    "grouped_tile",
    "narrow_tile",
]


@dataclass(frozen=True)
class FewTile:
    """One configuration of the kernel for the fewest rows: 16 rows of weights a CTA, shared by its `warps`."""

    warps: int


# Rows of x and their columns up to which the kernel for the fewest rows is the faster one.
_FEW_ROWS, _FEW_COLUMNS = 2, 8192


def few_tile(x: Tensor, weight: Int4Weight) -> FewTile | None:
    """The tile for so few rows of x, or None where another kernel is faster or it cannot read them."""
    readable = x.dtype == torch.bfloat16 or x.element_size() == 1
    fits = x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 and weight.cols % 16 == 0 and weight.cols <= _FEW_COLUMNS
    if not readable or not fits or len(x) > _FEW_ROWS:
        return None
    return FewTile(4 if weight.cols <= 1024 else 8)


@dataclass(frozen=True)
class NarrowTile:
    """One configuration of the kernel for few rows.

    tokens: rows of x it takes, the columns of its wgmma.
    stages: stages of the ring, 256 columns deep; the CTA must stay under half of an SM's shared memory.
    warpgroups: consumers, 1 or 2, a strip of weights each.
    pieces: how many CTAs may share a strip's columns, about: more read faster, and have more to sum.
    """

    tokens: int
    stages: int
    warpgroups: int = 1
    pieces: int = 6


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


@dataclass(frozen=True)
class GroupedTile:
    """One configuration of the grouped kernel, whose tiles have 128 rows of x.

    stages: stages of the ring, 256 columns deep.
    """

    stages: int

    tokens = 128
    # A thread's at launch, a consumer's, the producer's.
    registers = (168, 224, 56)


# Where every pair is a tile; wgmma has eight columns at least.
FEW_EXPERTS_TILE = DecodeTile(8, 11)
_DECODE = [DecodeTile(8, 11), DecodeTile(16, 10), DecodeTile(32, 8), DecodeTile(64, 6)]


def grouped_tile() -> GroupedTile:
    """The tile for many rows."""
    return GroupedTile(4)


def expert_tile(pairs: int, experts: int) -> DecodeTile | GroupedTile:
    """The tile for this many routed rows: the single launch as long as an expert's rows are one tile."""
    mean = pairs / experts
    if mean > 64:
        return grouped_tile()
    if mean <= 3:
        return _DECODE[0]
    return _DECODE[1] if mean <= 12 else _DECODE[2] if mean <= 24 else _DECODE[3]
