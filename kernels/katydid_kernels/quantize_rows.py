"""Activations in e4m3: one pass that makes the value and quantises it, so that bf16 never goes to memory in between.

    add_rms_norm_quantize:  r = x + residual;  y = r / rms(r) * weight
    swiglu_quantize:        y = silu(gate) * up
    quantize_fp8:           y = x
    q = e4m3(y * (1 / scale))

`scale` is either given (static: the checkpoint's ``input_scale``) or, ``max |y| / 448``, one for a token or for every
`group` columns of it, and then returned. All are bound by memory: a program keeps its whole rows in registers
between the reduction and the store.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from katydid_kernels.gemm.dense import runs_gluon

__all__ = [
    "FP8_MAX",
    "add_rms_norm_quantize",
    "add_rms_norm_quantize_reference",
    "quantize_fp8",
    "quantize_fp8_reference",
    "swiglu_quantize",
    "swiglu_quantize_reference",
]

FP8_MAX = 448.0
_E4M3 = torch.float8_e4m3fn
_SMALLEST_SCALE = 1e-12


def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    scale: Tensor | None = None,
    group: int | None = None,
    plain: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``(q, scale, r)``: e4m3 ``[T, n]``, fp32 scale ``[T]`` (or the one given) and ``x + residual``.

    Args:
        x, residual: ``[T, n]`` of one dtype, rows contiguous. Their sum is rounded to that dtype, then normalised.
        weight: ``[n]``.
        scale: fp32 of one element to quantise with, or None for one scale a token.
        group: columns that share a scale, a power of two that divides n: the scale is then ``[T, n / group]``.
        plain: ``[T, n]`` in the dtype of x, contiguous: where y goes too, rounded before it is quantised.

    Raises ValueError for a group that does not divide n, or one beside a given scale.
    """
    _check_group(x.shape[1], scale, group)
    if not _has_kernels(x):
        return add_rms_norm_quantize_reference(x, residual, weight, eps, scale=scale, group=group, plain=plain)
    tokens, n = x.shape
    q = torch.empty(tokens, n, dtype=_E4M3, device=x.device)
    total = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    scales = _scales(tokens, n, group, x.device) if scale is None else scale
    if tokens:
        _add_rms_norm_quantize_kernel[(tokens,)](
            x, residual, weight, scales, total, plain, q, n, x.stride(0), residual.stride(0), eps,
            STATIC=scale is not None, GROUP=group, BLOCK=triton.next_power_of_2(n), num_warps=4, **_early(x),
        )  # fmt: skip
    return q, scales, total


def swiglu_quantize(gate_up: Tensor, *, scale: Tensor | None = None, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns ``(q, scale)``: e4m3 ``[T, n]`` and fp32 ``[T]`` (or the scale given).

    Args:
        gate_up: ``[T, 2 * n]``, gate in the first half, up in the second, rows contiguous.
        scale, group: as above.
    """
    _check_group(gate_up.shape[1] // 2, scale, group)
    if not _has_kernels(gate_up):
        return swiglu_quantize_reference(gate_up, scale=scale, group=group)
    tokens, n = gate_up.shape[0], gate_up.shape[1] // 2
    q = torch.empty(tokens, n, dtype=_E4M3, device=gate_up.device)
    scales = _scales(tokens, n, group, gate_up.device) if scale is None else scale
    if tokens:
        # Three equal parts leave no lane idle where one block of a power of two would a quarter of them.
        parts = 3 if group is None and n % 3 == 0 and n >= 192 and (n // 3) & (n // 3 - 1) == 0 else 1
        block = triton.next_power_of_2(n // parts)
        # A program of few bytes does not pay for its start: narrow rows share one.
        rows = 1 << max(0, (4096 // (block * parts)).bit_length() - 1)
        _swiglu_quantize_kernel[(triton.cdiv(tokens, rows),)](
            gate_up, scales, q, tokens, n, gate_up.stride(0),
            STATIC=scale is not None, GROUP=group, ROWS=rows, BLOCK=block, PARTS=parts,
            EVEN=n == block * parts and tokens % rows == 0, num_warps=8 if parts == 1 else 4, **_early(gate_up),
        )  # fmt: skip
    return q, scales


def quantize_fp8(
    x: Tensor, *, scale: Tensor | None = None, group: int | None = None, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Returns ``(q, scale)``: e4m3 ``[T, n]`` and fp32 ``[T]`` (or the scale given).

    Args:
        x: ``[T, n]``, rows contiguous; for what no norm or SwiGLU makes, such as the output of attention.
        scale, group: as above.
        out: where to write q and, unless it is given, the scale, in place of new tensors.
    """
    _check_group(x.shape[1], scale, group)
    if not _has_kernels(x):
        found = quantize_fp8_reference(x, scale=scale, group=group)
        return found if out is None else (out[0].copy_(found[0]), out[1].copy_(found[1]))
    tokens, n = x.shape
    q, scales = out or (torch.empty(tokens, n, dtype=_E4M3, device=x.device), _scales(tokens, n, group, x.device))
    scales = scales if scale is None else scale
    if tokens:
        block = triton.next_power_of_2(n)
        rows = max(1, 4096 // block)
        _quantize_fp8_kernel[(triton.cdiv(tokens, rows),)](
            x, scales, q, tokens, n, x.stride(0),
            STATIC=scale is not None, GROUP=group, ROWS=rows, BLOCK=block, num_warps=4, **_early(x),
        )  # fmt: skip
    return q, scales


def _check_group(n: int, scale: Tensor | None, group: int | None) -> None:
    if group is None:
        return
    if scale is not None:
        raise ValueError("group and scale exclude each other: a given scale holds for everything")
    if group <= 0 or group & (group - 1) or n % group:
        raise ValueError(f"group must be a power of two that divides the {n} columns, got {group}")


def _scales(tokens: int, n: int, group: int | None, device: torch.device) -> Tensor:
    shape = (tokens,) if group is None else (tokens, n // group)
    return torch.empty(shape, dtype=torch.float32, device=device)


def _early(tensor: Tensor) -> dict[str, bool]:
    """Launch before the kernel ahead has ended (PDL): a kernel of 20 us would spend one on starting."""
    early = runs_gluon(tensor.device)
    return {"EARLY": early, "launch_pdl": early}


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda


@triton.jit
def _start(EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _store_quantized(y, scale_ptr, q_ptr, row, valid, n, col, STATIC: tl.constexpr, GROUP: tl.constexpr):
    """``y[ROWS, BLOCK]``, zero past column n, as e4m3."""
    if GROUP is not None:
        ROWS: tl.constexpr = y.shape[0]
        GROUPS: tl.constexpr = y.shape[1] // GROUP
        scale = tl.maximum(tl.max(tl.abs(tl.reshape(y, [ROWS, GROUPS, GROUP])), 2) / 448.0, 1e-12)
        group = tl.arange(0, GROUPS)
        place = scale_ptr + row.to(tl.int64)[:, None] * (n // GROUP) + group[None, :]
        tl.store(place, scale, mask=valid[:, None] & (group < n // GROUP)[None, :])
        inverse = tl.reshape(tl.broadcast_to((1.0 / scale)[:, :, None], [ROWS, GROUPS, GROUP]), [ROWS, GROUPS * GROUP])
    else:
        inverse = _inverse_scale(tl.max(tl.abs(y), 1), scale_ptr, row, valid, STATIC)
    _store_scaled(y, inverse, q_ptr, row, n, col, valid[:, None] & (col < n)[None, :])


@triton.jit
def _inverse_scale(largest, scale_ptr, row, valid, STATIC: tl.constexpr):
    """Of one scale for everything, or of one for each row of this largest value, which is stored."""
    if STATIC:
        inverse = 1.0 / tl.load(scale_ptr)
    else:
        scale = tl.maximum(largest / 448.0, 1e-12)
        tl.store(scale_ptr + row, scale, mask=valid)
        inverse = (1.0 / scale)[:, None]
    return inverse


@triton.jit
def _store_scaled(y, inverse, q_ptr, row, n, col, inside):
    # A division an element would take longer than reading it. e4m3 has no infinity: what exceeds its range must be
    # clamped or it becomes NaN.
    q = tl.minimum(tl.maximum(y * inverse, -448.0), 448.0)
    tl.store(q_ptr + row.to(tl.int64)[:, None] * n + col[None, :], q.to(q_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_rms_norm_quantize_kernel(
    x_ptr, residual_ptr, weight_ptr, scale_ptr, total_ptr, plain_ptr, q_ptr, n, x_row_stride, residual_row_stride, eps,
    STATIC: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        # In this order: what stands before a norm is often bound by memory (experts), and the kernel behind it would
        # read its weights, and hold its registers, at that kernel's cost.
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row.to(tl.int64) * x_row_stride + col, mask=col < n, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + row.to(tl.int64) * residual_row_stride + col, mask=col < n, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + col, mask=col < n, other=0.0).to(tl.float32)
    total = x.to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row.to(tl.int64) * n + col, total, mask=col < n)
    x = total.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / n + eps) * weight
    if plain_ptr is not None:
        rounded = y.to(plain_ptr.dtype.element_ty)
        tl.store(plain_ptr + row.to(tl.int64) * n + col, rounded, mask=col < n)
        y = rounded.to(tl.float32)
    rows = row + tl.arange(0, 1)
    _store_quantized(y[None, :], scale_ptr, q_ptr, rows, rows >= 0, n, col, STATIC, GROUP)


@triton.jit
def _swiglu_part(source, n, inside, other):
    gate = tl.load(source, mask=inside, other=other).to(tl.float32)
    up = tl.load(source + n, mask=inside, other=other).to(tl.float32)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _swiglu_quantize_kernel(
    gate_up_ptr, scale_ptr, q_ptr, tokens, n, row_stride,
    STATIC: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows of PARTS (1 or 3) blocks of columns. EVEN: every row and column is there, and nothing is masked."""
    _start(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    valid = row < tokens
    if EVEN:
        inside, other = None, None
    else:
        inside, other = valid[:, None] & (col < n)[None, :], 0.0
    source = gate_up_ptr + row.to(tl.int64)[:, None] * row_stride + col[None, :]
    y = _swiglu_part(source, n, inside, other)
    if GROUP is not None:
        _store_quantized(y, scale_ptr, q_ptr, row, valid, n, col, STATIC, GROUP)
    elif PARTS == 1:
        inverse = _inverse_scale(tl.max(tl.abs(y), 1), scale_ptr, row, valid, STATIC)
        _store_scaled(y, inverse, q_ptr, row, n, col, inside)
    else:
        second = _swiglu_part(source + BLOCK, n, inside, other)
        third = _swiglu_part(source + 2 * BLOCK, n, inside, other)
        largest = tl.maximum(tl.max(tl.abs(y), 1), tl.maximum(tl.max(tl.abs(second), 1), tl.max(tl.abs(third), 1)))
        inverse = _inverse_scale(largest, scale_ptr, row, valid, STATIC)
        _store_scaled(y, inverse, q_ptr, row, n, col, inside)
        _store_scaled(second, inverse, q_ptr + BLOCK, row, n, col, inside)
        _store_scaled(third, inverse, q_ptr + 2 * BLOCK, row, n, col, inside)


@triton.jit
def _quantize_fp8_kernel(
    x_ptr, scale_ptr, q_ptr, tokens, n, row_stride,
    STATIC: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    _start(EARLY)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    inside = (row < tokens)[:, None] & (col < n)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * row_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    _store_quantized(x, scale_ptr, q_ptr, row, row < tokens, n, col, STATIC, GROUP)


def add_rms_norm_quantize_reference(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    scale: Tensor | None = None,
    group: int | None = None,
    plain: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_rms_norm_quantize` in torch and fp32: what it computes, and what runs without a GPU."""
    total = x + residual
    wide = total.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    if plain is not None:
        y = plain.copy_(y).float()
    return *_quantize_reference(y, scale, group), total


def swiglu_quantize_reference(
    gate_up: Tensor, *, scale: Tensor | None = None, group: int | None = None
) -> tuple[Tensor, Tensor]:
    """`swiglu_quantize` likewise."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return _quantize_reference(F.silu(gate) * up, scale, group)


def quantize_fp8_reference(
    x: Tensor, *, scale: Tensor | None = None, group: int | None = None
) -> tuple[Tensor, Tensor]:
    """`quantize_fp8` likewise."""
    return _quantize_reference(x.float(), scale, group)


def _quantize_reference(y: Tensor, scale: Tensor | None, group: int | None) -> tuple[Tensor, Tensor]:
    if group is not None:
        q, scales = _quantize_reference(y.unflatten(1, (y.shape[1] // group, group)), None, None)
        return q.view(y.shape), scales
    scales = (y.abs().amax(-1) / FP8_MAX).clamp(min=_SMALLEST_SCALE) if scale is None else scale
    inverse = 1 / (scales[..., None] if scale is None else scales)
    return (y * inverse).clamp(-FP8_MAX, FP8_MAX).to(_E4M3), scales
