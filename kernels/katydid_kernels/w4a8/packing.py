"""The packed int4 weight: an order of bits from which wgmma's register operand falls out in three steps a word.

A weight ``[N, K]`` is symmetric int4, -8 to 7, with one bf16 scale for every 128 columns of a row. Its rows are cut
into strips of 64 (the rows of one wgmma), its columns into units of 64. Row 0..63 of a strip is ``16 * warp + 8 * half
+ g``, column 0..63 of a unit is ``16 * j + 4 * q + b``: thread ``lane = 4 * g + q`` of warp ``warp`` holds exactly
these in registers when wgmma multiplies, byte b of register ``2 * (j % 2) + half`` of step ``j // 2``.

codes, uint8 ``[strips, 16 * units, 128]``: a unit is 16 lines of 128 bytes, 2 KiB. Byte ``512 * warp + 16 * lane +
4 * j + b`` of it holds, in two's complement, the value at half 0 in its low four bits and the one at half 1 above.

As e4m3, the bytes 0..15 are exactly 0..15 over 512: the subnormals 0..7 and the first normal numbers. With w a word of
four bytes, ``(w & 0x0f0f0f0f) ^ 0x08080808`` is thus four e4m3 for half 0, eight too large, and the same of ``w >> 4``
is half 1's: three instructions for eight values, where the tensor cores can take eight times the sum of x off again.
Where they cannot, nine make the sign and magnitude of each (`packed_tiles`). Nothing is looked up or rounded, and 512
joins the scale at the very end.

scales, bf16 ``[strips, groups, 64]``: row r of group k of a strip is the scale of that row's columns 128k..128k + 127.
A last group may be half; rows and columns that do not exist have code 0 and scale 0.

The gate and up rows of SwiGLU (`gated`) are interleaved eight by eight before packing, gate first: half 0 is gate and
half 1 up, so that a thread holds both of a column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "CODE_SCALE",
    "GROUP",
    "Int4Weight",
    "dequantize_int4",
    "pack_int4",
    "quantize_int4",
    "unpack_int4",
]

GROUP = 128
# What a code is worth as e4m3 is its value over this.
CODE_SCALE = 512.0
_STRIP, _UNIT = 64, 64
_WARPS, _HALVES, _ROWS, _QUADS, _COLUMNS, _BYTES = 4, 2, 8, 4, 4, 4
# The scales the search tries, as shares of the one at which nothing is clipped.
_SHARES = [1.0 - step / 40 for step in range(18)]


@dataclass(frozen=True)
class Int4Weight:
    """A packed ``[*, rows, cols]`` weight; leading dimensions, of experts, stand before those of both tensors.

    codes: uint8 ``[*, strips, 16 * units, 128]``.
    scales: bf16 ``[*, strips, groups, 64]``.
    gated: the rows are gate and up, interleaved.
    """

    codes: Tensor
    scales: Tensor
    rows: int
    cols: int
    gated: bool = False

    def __post_init__(self) -> None:
        strips, units, groups = -(-self.rows // _STRIP), -(-self.cols // _UNIT), -(-self.cols // GROUP)
        for name, tensor, dtype, shape in (
            ("codes", self.codes, torch.uint8, (strips, 16 * units, 128)),
            ("scales", self.scales, torch.bfloat16, (strips, groups, _STRIP)),
        ):
            if tensor.dtype != dtype or tuple(tensor.shape[-3:]) != shape or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} of a [{self.rows}, {self.cols}] weight must be contiguous {dtype} [..., {shape}], "
                    f"got {tensor.dtype} {tuple(tensor.shape)}"
                )
        if self.codes.shape[:-3] != self.scales.shape[:-3]:
            raise ValueError(
                f"codes and scales must share their leading dimensions, got {tuple(self.codes.shape)} and "
                f"{tuple(self.scales.shape)}"
            )

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def to(self, device: torch.device | str) -> Int4Weight:
        return Int4Weight(self.codes.to(device), self.scales.to(device), self.rows, self.cols, self.gated)


def quantize_int4(
    weight: Tensor, clip: Literal["none", "mse"] = "none", importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes int8 ``[*, N, K]`` in -8..7 and scales bf16 ``[*, N, ceil(K / 128)]`` of a float weight ``[*, N, K]``.

    clip: "none" rounds to nearest under the scale that takes the largest magnitude of a group to 7; "mse" picks, of
        smaller scales too and of scales of either sign (one of which lets the largest magnitude be -8), the one with
        the least squared error.
    importance: ``[B, K]`` of a weight ``[B, N, K]``, what the squared error of a column counts for "mse"; None for
        all the same. A group of columns that count nothing is rounded to nearest.

    Raises ValueError for another `clip`, or a weight that is not finite.
    """
    if clip not in ("none", "mse"):
        raise ValueError(f"clip must be 'none' or 'mse', got {clip!r}")
    if not weight.isfinite().all():
        raise ValueError("weight must be finite to be quantised")
    groups = _grouped(weight.float())
    largest = groups.abs().amax(-1)
    scale = _rounded_scale(largest / 7)
    if clip == "mse":
        counts = None if importance is None else _grouped(importance.float())[:, None]
        best = _squared_error(groups, scale, counts)
        for share in _SHARES:
            for candidate in (largest * (share / 7.5), largest * (share / -7.5)):
                candidate = _rounded_scale(candidate)
                error = _squared_error(groups, candidate, counts)
                scale = torch.where(error < best, candidate, scale)
                best = torch.minimum(error, best)
    codes = _codes(groups, scale).to(torch.int8).flatten(-2)[..., : weight.shape[-1]]
    return codes.contiguous(), scale.bfloat16()


def _grouped(weight: Tensor) -> Tensor:
    """Columns in groups, the last one filled up with zeros."""
    grouped: Tensor = F.pad(weight, (0, -weight.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    return grouped


def _rounded_scale(scale: Tensor) -> Tensor:
    return scale.bfloat16().float()


def _codes(groups: Tensor, scale: Tensor) -> Tensor:
    # A group of zeros has scale 0 and code 0.
    divisor = torch.where(scale == 0, 1.0, scale)[..., None]
    return (groups / divisor).round().clamp(-8, 7)


def _squared_error(groups: Tensor, scale: Tensor, counts: Tensor | None) -> Tensor:
    squared = (_codes(groups, scale) * scale[..., None] - groups).square()
    return squared.sum(-1) if counts is None else (squared * counts).sum(-1)


def dequantize_int4(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 ``[*, N, K]`` of codes ``[*, N, K]`` and scales ``[*, N, ceil(K / 128)]``: exact."""
    wide = scales.float().repeat_interleave(GROUP, -1)
    return codes.float() * wide[..., : codes.shape[-1]]


def pack_int4(codes: Tensor, scales: Tensor, *, gated: bool = False) -> Int4Weight:
    """Lay out what `quantize_int4` returns; `gated`: the first half of the rows are gate, the second up.

    Raises ValueError for codes outside -8..7, shapes that do not fit, or gated halves that are no multiple of 32.
    """
    rows, cols = codes.shape[-2:]
    if scales.shape != (*codes.shape[:-1], -(-cols // GROUP)):
        raise ValueError(f"scales must be [..., {rows}, {-(-cols // GROUP)}] here, got {list(scales.shape)}")
    if codes.numel() and not -8 <= int(codes.min()) <= int(codes.max()) <= 7:
        raise ValueError(f"codes must be in -8..7, got {int(codes.min())}..{int(codes.max())}")
    if gated and rows % _STRIP:
        raise ValueError(f"gate and up must have a multiple of {_STRIP // 2} rows each, got {rows} in all")
    if gated:
        codes, scales = _interleave(codes), _interleave(scales)
    codes = F.pad(codes.to(torch.int8), (0, -cols % _UNIT, 0, -rows % _STRIP))
    scales = F.pad(scales.bfloat16(), (0, 0, 0, -rows % _STRIP)).unflatten(-2, (-1, _STRIP)).transpose(-1, -2)

    lead = codes.ndim - 2
    tiles = codes.unflatten(-1, (-1, _COLUMNS, _QUADS, _BYTES)).unflatten(lead, (-1, _WARPS, _HALVES, _ROWS))
    strip, warp, half, row, unit, column, quad, byte = range(lead, lead + 8)
    tiles = tiles.permute(*range(lead), strip, unit, warp, row, quad, column, byte, half)
    packed = (tiles[..., 0] & 15 | tiles[..., 1] << 4).flatten(lead + 1).unflatten(lead + 1, (-1, 128))
    return Int4Weight(packed.contiguous().view(torch.uint8), scales.contiguous(), rows, cols, gated)


def unpack_int4(weight: Int4Weight) -> tuple[Tensor, Tensor]:
    """The codes int8 ``[*, rows, cols]`` and scales ``[*, rows, groups]`` that were packed."""
    lead = weight.codes.ndim - 3
    flat = weight.codes.flatten(lead + 1)
    packed = flat.unflatten(lead + 1, (-1, _WARPS, _ROWS, _QUADS, _COLUMNS, _BYTES))
    low, high = (packed << 4).view(torch.int8) >> 4, packed.view(torch.int8) >> 4
    strip, unit, warp, row, quad, column, byte, half = range(lead, lead + 8)
    tiles = torch.stack((low, high), -1).permute(*range(lead), strip, warp, half, row, unit, column, quad, byte)
    codes = tiles.flatten(lead + 4).flatten(lead, lead + 3)[..., : weight.rows, : weight.cols]
    scales = weight.scales.transpose(-1, -2).flatten(lead, lead + 1)[..., : weight.rows, :]
    if weight.gated:
        codes, scales = _separate(codes), _separate(scales)
    return codes.contiguous(), scales.contiguous()


def _interleave(rows: Tensor) -> Tensor:
    eights: Tensor = rows.unflatten(-2, (2, -1, _ROWS))
    return eights.transpose(-4, -3).flatten(-4, -2)


def _separate(rows: Tensor) -> Tensor:
    eights: Tensor = rows.unflatten(-2, (-1, 2, _ROWS))
    return eights.transpose(-4, -3).flatten(-4, -2)
