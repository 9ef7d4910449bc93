"""Rows on their way to the ranks of their experts and back: who goes where, the messages, and the sum at home.

A message is a row's values, its scales if it is quantised, the slots of its experts and their weights, one behind the
other; a row goes once to each rank that has any of its experts. Messages to a rank lie in order of rows:

    place(t, r) = start(r) + rows before t that go to r        start(r): rows to ranks before r, or r * capacity

Each pass reads what it moves once and writes it once; bound by memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from katydid_kernels.quantize_rows import quantize_fp8

__all__ = ["gather_rows", "join_rows", "route_rows", "scatter_rows", "split_rows"]

_E4M3 = torch.float8_e4m3fn
_TOKENS = 1024


def route_rows(ids: Tensor, slots: int, ranks: int) -> tuple[Tensor, Tensor]:
    """For every row the number of its message to each rank, counted from the rank's first, int32 ``[T, ranks]``, -1
    where it does not go; and rows to each rank, int64 ``[ranks]``.

    Args:
        ids: int32 ``[T, top_k]``, slots of all ranks one after the other, ``slots`` each; others go nowhere.
    """
    if not _has_kernels(ids):
        goes = F.one_hot((ids // slots).clamp(0, ranks).long(), ranks + 1)[:, :, :-1].amax(1)
        return torch.where(goes > 0, goes.cumsum(0) - 1, -1).int(), goes.sum(0)
    order = torch.empty(len(ids), ranks, dtype=torch.int32, device=ids.device)
    counts = torch.zeros(ranks, dtype=torch.int64, device=ids.device)
    if len(ids):
        top_k = ids.shape[1]
        _route_kernel[(ranks,)](
            ids.contiguous(), order, counts, len(ids), slots, top_k, ranks, K=triton.next_power_of_2(top_k),
            BLOCK=min(_TOKENS, triton.next_power_of_2(len(ids))), num_warps=8,
        )  # fmt: skip
    return order, counts


def scatter_rows(
    values: Tensor,
    scales: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    order: Tensor,
    counts: Tensor,
    *,
    total: int,
    capacity: int | None = None,
    nowhere: int = 0,
) -> Tensor:
    """Messages uint8 ``[total, bytes]``.

    Args:
        values: ``[T, n]``, contiguous.
        scales: fp32 ``[T, s]``; None of plain rows.
        ids, weights: int32 and fp32 ``[T, top_k]``.
        order, counts: of `route_rows`.
        total: messages to all ranks; with ``capacity`` so many to each, of which those that no row fills hold
            ``nowhere`` in place of slots and anything else in place of values.
    """
    parts = [_words(values), *([] if scales is None else [_words(scales)]), ids.contiguous(), _words(weights)]
    widths = [part.shape[1] for part in parts]
    message = torch.empty(total, sum(widths), dtype=torch.int32, device=values.device)
    top_k = ids.shape[1]
    if capacity is not None:
        message[:, -2 * top_k : -top_k] = nowhere
    if not _has_kernels(values):
        place = _places(order, counts, capacity)
        row, rank = (order >= 0).nonzero(as_tuple=True)
        message[place[row, rank]] = torch.cat(parts, dim=1)[row]
    elif len(values):
        own, beside = parts[0], torch.cat(parts[1:], dim=1)
        _scatter_kernel[(len(values),)](
            own, beside, message, order, counts, widths[0], beside.shape[1], order.shape[1], -1 if capacity is None
            else capacity, RANKS=triton.next_power_of_2(order.shape[1]), BLOCK=triton.next_power_of_2(widths[0]),
            BESIDE=triton.next_power_of_2(beside.shape[1]), num_warps=4,
        )  # fmt: skip
    return message.view(torch.uint8)


def split_rows(message: Tensor, value_bytes: int, scales: int, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(values, scales, ids, weights)`` of messages ``[N, bytes]``: uint8 ``[N, value_bytes]``, fp32 ``[N, scales]``,
    int32 and fp32 ``[N, top_k]``, each contiguous."""
    words, rows = message.view(torch.int32), len(message)
    sizes = (value_bytes // 4, scales, top_k, top_k)
    if not _has_kernels(message):
        parts = [part.contiguous() for part in words.split(sizes, dim=1)]
    else:
        parts = [torch.empty(rows, size, dtype=torch.int32, device=message.device) for size in sizes]
        if rows:
            block = triton.next_power_of_2(sizes[0])
            beside = triton.next_power_of_2(sum(sizes[1:]))
            _split_kernel[(rows,)](words, *parts, *sizes[:3], words.shape[1], BLOCK=block, BESIDE=beside, num_warps=4)
    values, scale, ids, weights = parts
    return values.view(torch.uint8), scale.view(torch.float32), ids, weights.view(torch.float32)


def join_rows(x: Tensor) -> Tensor:
    """Rows ``[N, n]`` quantised for the way, uint8 ``[N, n + 4]``: e4m3 and the row's fp32 scale."""
    if not _has_kernels(x):
        values, scale = quantize_fp8(x)
        return torch.cat((values.view(torch.uint8), scale[:, None].contiguous().view(torch.uint8)), dim=1)
    message = torch.empty(len(x), x.shape[1] + 4, dtype=torch.uint8, device=x.device)
    if len(x):
        n = x.shape[1]
        _join_kernel[(len(x),)](
            x, message.view(_E4M3), message.view(torch.float32), n, x.stride(0), BLOCK=triton.next_power_of_2(n),
            num_warps=8,
        )  # fmt: skip
    return message


def gather_rows(
    home: Tensor, order: Tensor, counts: Tensor, extra: Tensor | None, dtype: torch.dtype, *, quantized: bool,
    capacity: int | None = None,
) -> Tensor:  # fmt: skip
    """The sum of what came home for each row, in the order of ranks and in fp32, plus ``extra``: ``[T, n]``.

    Args:
        home: ``[N, n]`` of plain rows, or uint8 ``[N, n + 4]`` as `join_rows` makes them.
        order, counts, capacity: as they were sent.
        extra: ``[T, n]`` or None.
        dtype: of the result.
    """
    n = home.shape[1] - 4 if quantized else home.shape[1]
    if not _has_kernels(home):
        rows = home
        if quantized:
            scale = home[:, n:].contiguous().view(torch.float32)
            rows = home[:, :n].contiguous().view(_E4M3).float() * scale
        place = _places(order, counts, capacity)
        total = torch.zeros(len(order), n)
        for rank in range(order.shape[1]):
            goes = order[:, rank] >= 0
            total[goes] += rows[place[goes, rank]].float()
        return (total if extra is None else total + extra).to(dtype)
    out = torch.empty(len(order), n, dtype=dtype, device=home.device)
    if len(order):
        _gather_kernel[(len(order),)](
            home.view(_E4M3) if quantized else home, home.view(torch.float32) if quantized else home, order, counts,
            extra, out, n, order.shape[1], -1 if capacity is None else capacity, QUANTIZED=quantized,
            RANKS=triton.next_power_of_2(order.shape[1]), BLOCK=triton.next_power_of_2(n), num_warps=8,
        )  # fmt: skip
    return out


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _words(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def _places(order: Tensor, counts: Tensor, capacity: int | None) -> Tensor:
    if capacity is not None:
        return order + torch.arange(order.shape[1]) * capacity
    return order + (counts.cumsum(0) - counts)


@triton.jit
def _route_kernel(
    ids_ptr, order_ptr, counts_ptr, tokens, slots, top_k, ranks, K: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program a rank goes over all rows."""
    rank = tl.program_id(0)
    choice = tl.arange(0, K)
    found = 0
    for first in range(0, tokens, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = (token < tokens)[:, None] & (choice < top_k)[None, :]
        slot = tl.load(ids_ptr + token[:, None] * top_k + choice[None, :], mask=inside, other=-1)
        goes = tl.max(((slot >= rank * slots) & (slot < (rank + 1) * slots)).to(tl.int32), 1)
        number = tl.cumsum(goes, 0) - 1 + found
        tl.store(order_ptr + token * ranks + rank, tl.where(goes > 0, number, -1), mask=token < tokens)
        found += tl.sum(goes, 0)
    tl.store(counts_ptr + rank, found)


@triton.jit
def _start(counts_ptr, rank, ranks, capacity, RANKS: tl.constexpr):
    """Where messages to a rank begin."""
    other = tl.arange(0, RANKS)
    before = tl.load(counts_ptr + other, mask=(other < rank) & (other < ranks), other=0)
    return tl.where(capacity < 0, tl.sum(before, 0), rank * capacity)


@triton.jit
def _scatter_kernel(
    values_ptr, beside_ptr, message_ptr, order_ptr, counts_ptr, n, more, ranks, capacity,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    word, side = tl.arange(0, BLOCK), tl.arange(0, BESIDE)
    values = tl.load(values_ptr + token * n + word, mask=word < n, other=0)
    beside = tl.load(beside_ptr + token * more + side, mask=side < more, other=0)
    for rank in range(ranks):
        number = tl.load(order_ptr + token * ranks + rank)
        if number >= 0:
            target = message_ptr + (_start(counts_ptr, rank, ranks, capacity, RANKS) + number) * (n + more)
            tl.store(target + word, values, mask=word < n)
            tl.store(target + n + side, beside, mask=side < more)


@triton.jit
def _split_kernel(
    message_ptr, values_ptr, scales_ptr, ids_ptr, weights_ptr, n, scales, top_k, stride,
    BLOCK: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    word, side = tl.arange(0, BLOCK), tl.arange(0, BESIDE)
    values = tl.load(message_ptr + row * stride + word, mask=word < n, other=0)
    tl.store(values_ptr + row * n + word, values, mask=word < n)
    beside = tl.load(message_ptr + row * stride + n + side, mask=side < scales + 2 * top_k, other=0)
    tl.store(scales_ptr + row * scales + side, beside, mask=side < scales)
    slot = side - scales
    tl.store(ids_ptr + row * top_k + slot, beside, mask=(slot >= 0) & (slot < top_k))
    weight = slot - top_k
    tl.store(weights_ptr + row * top_k + weight, beside, mask=(weight >= 0) & (weight < top_k))


@triton.jit
def _join_kernel(x_ptr, values_ptr, scales_ptr, n, row_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * row_stride + column, mask=column < n, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / 448.0, 1e-12)
    q = tl.minimum(tl.maximum(x * (1.0 / scale), -448.0), 448.0)
    tl.store(values_ptr + row * (n + 4) + column, q.to(values_ptr.dtype.element_ty), mask=column < n)
    tl.store(scales_ptr + row * (n // 4 + 1) + n // 4, scale)


@triton.jit
def _gather_kernel(
    home_ptr, scales_ptr, order_ptr, counts_ptr, extra_ptr, out_ptr, n, ranks, capacity,
    QUANTIZED: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for rank in range(ranks):
        number = tl.load(order_ptr + token * ranks + rank)
        if number >= 0:
            row = _start(counts_ptr, rank, ranks, capacity, RANKS) + number
            if QUANTIZED:
                scale = tl.load(scales_ptr + row * (n // 4 + 1) + n // 4)
                part = tl.load(home_ptr + row * (n + 4) + column, mask=column < n, other=0.0)
                total += part.to(tl.float32) * scale
            else:
                total += tl.load(home_ptr + row * n + column, mask=column < n, other=0.0).to(tl.float32)
    if extra_ptr is not None:
        total += tl.load(extra_ptr + token * n + column, mask=column < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * n + column, total.to(out_ptr.dtype.element_ty), mask=column < n)
