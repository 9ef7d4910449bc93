"""GPTQ's inner loop: columns are rounded one after another, and each error is spread over the columns behind it.

    for c in 0 .. C - 1:    code[:, c] = round(w[:, c] / s[:, c])
                            error[:, c] = (w[:, c] - code[:, c] s[:, c]) / u[c, c]
                            w[:, c:] -= error[:, c] u[c, c:]

of weights w and scales s ``[N, C]`` and an upper triangular u, for B of them at once (Frantar et al., "GPTQ", 2022,
section 3.3). Column by column this is a dozen launches each, over rows that lie far apart; here a program keeps all
columns of its rows in registers: w and s are read once, codes and errors written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["round_columns", "round_columns_reference"]

LARGEST = 128  # columns
_ROWS = 16
# Added and taken off again, it rounds an fp32 number below 2^22 to the nearest whole one, halves to even.
_WHOLE = tl.constexpr(12582912.0)


def round_columns(weight: Tensor, scales: Tensor, spread: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and errors, fp32 ``[B, N, C]``.

    Args:
        weight, scales: fp32 ``[B, N, C]``, C <= 128, columns contiguous. Where a scale is 0 its code means nothing.
        spread: fp32 ``[B, C, C]``, upper triangular with a positive diagonal.
        dtype: int8 for the values -8 to 7, or float8_e4m3fn.

    Raises ValueError for another dtype, or shapes that do not fit.
    """
    if dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f"dtype must be int8 or float8_e4m3fn, got {dtype}")
    batch, rows, columns = weight.shape
    if columns > LARGEST or scales.shape != weight.shape or spread.shape != (batch, columns, columns):
        raise ValueError(
            f"expected weight and scales [B, N, C], C <= {LARGEST}, and spread [B, C, C], got {list(weight.shape)}, "
            f"{list(scales.shape)} and {list(spread.shape)}"
        )
    if not weight.is_cuda or not rows * batch:
        return round_columns_reference(weight, scales, spread, dtype)
    return launch(weight, scales, spread, dtype)


def launch(weight: Tensor, scales: Tensor, spread: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, rows, columns = weight.shape
    codes, errors = (torch.empty(batch, rows, columns, device=weight.device) for _ in range(2))
    _round_columns_kernel[(triton.cdiv(rows, _ROWS), batch)](
        weight, scales, spread, codes, errors, rows, columns,
        weight.stride(0), weight.stride(1), scales.stride(0), scales.stride(1), spread.stride(0), spread.stride(1),
        E4M3=dtype == torch.float8_e4m3fn, ROWS=_ROWS, COLUMNS=LARGEST, num_warps=4,
    )  # fmt: skip
    return codes, errors


def round_columns_reference(
    weight: Tensor, scales: Tensor, spread: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    work, codes, errors = weight.clone(), torch.empty_like(weight), torch.empty_like(weight)
    for column in range(weight.shape[2]):
        value, scale = work[..., column], scales[..., column]
        whole = value / torch.where(scale == 0, 1.0, scale)
        if dtype == torch.int8:
            code = whole.round().clamp(-8, 7)
        else:
            code = whole.clamp(-448, 448).to(torch.float8_e4m3fn).float()
        error = (value - code * scale) / spread[:, column, column, None]
        work[..., column:] -= error[..., None] * spread[:, None, column, column:]
        codes[..., column], errors[..., column] = code, error
    return codes, errors


@triton.jit(do_not_specialize=["rows", "columns"])
def _round_columns_kernel(
    weight_ptr, scales_ptr, spread_ptr, codes_ptr, errors_ptr, rows, columns, weight_batch, weight_row, scales_batch,
    scales_row, spread_batch, spread_row, E4M3: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None]
    weight = tl.load(
        weight_ptr + batch * weight_batch + row[:, None] * weight_row + column[None], mask=inside, other=0.0
    )
    scales = tl.load(
        scales_ptr + batch * scales_batch + row[:, None] * scales_row + column[None], mask=inside, other=1.0
    )
    codes = tl.zeros([ROWS, COLUMNS], tl.float32)
    errors = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in range(columns):
        spread = tl.load(spread_ptr + batch * spread_batch + at * spread_row + column, mask=column < columns, other=0.0)
        here = column == at
        value = tl.sum(tl.where(here[None], weight, 0.0), 1)
        scale = tl.sum(tl.where(here[None], scales, 0.0), 1)
        pivot = tl.sum(tl.where(here, spread, 0.0), 0)
        whole = tl.div_rn(value, tl.where(scale == 0.0, 1.0, scale))
        if E4M3:
            code = tl.clamp(whole, -448.0, 448.0).to(tl.float8e4nv).to(tl.float32)
        else:
            code = tl.clamp((tl.clamp(whole, -9.0, 8.0) + _WHOLE) - _WHOLE, -8.0, 7.0)
        error = tl.div_rn(value - code * scale, pivot + tl.zeros_like(value))
        weight -= error[:, None] * spread[None]
        codes = tl.where(here[None], code[:, None], codes)
        errors = tl.where(here[None], error[:, None], errors)
    out = (batch * rows + row[:, None]) * columns + column[None]
    tl.store(codes_ptr + out, codes, mask=inside)
    tl.store(errors_ptr + out, errors, mask=inside)
