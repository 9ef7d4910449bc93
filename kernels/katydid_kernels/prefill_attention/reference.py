"""Paged causal attention in plain torch: what the kernels must equal, and what runs on a machine with no GPU.

The result of a query token depends on its own keys alone, bit for bit where the CPU's matrix product allows it: queries
are cut into tiles, keys are walked in segments of one fixed size that start at token 0, and a segment with no visible
key leaves a row's running (maximum, sum, output) exactly as it was.  So neither the rest of the batch nor the chunking
of the prompt changes a row, and decoding a token equals prefilling it.  Tiles are padded to eight rows because smaller
matrix products take another path in the CPU libraries.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

__all__ = ["prefill_attention_reference"]

PAGE = 64
_SEGMENT_PAGES = 4
_TILE_TOKENS = 64
_MIN_ROWS = 8


def prefill_attention_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_q_lens: Tensor,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attend new tokens to every earlier token of their row, themselves included.

    Shapes are those of `prefill_attention`; `dtype` is the dtype of all arithmetic (float64 makes it an oracle).
    Returns the output `[tokens, heads, head_dim]` and the natural-log sum of exponentials `[tokens, heads]`, both in
    `dtype`; a token with nothing to see gives zeros and -inf.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = k_pages.shape[1]
    group = heads // kv_heads
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(tokens, heads, head_dim, dtype=dtype, device=q.device)
    lse = torch.full((tokens, heads), float("-inf"), dtype=dtype, device=q.device)

    starts, lens = cu_q_lens.tolist(), context_lens.tolist()
    longest = max((b - a for a, b in itertools.pairwise(starts)), default=0)
    tile_tokens = max(min(_TILE_TOKENS, longest), -(-_MIN_ROWS // group))
    tiles = [
        (row, first, min(tile_tokens, end - first), lens[row] - (end - first))
        for row, (begin, end) in enumerate(itertools.pairwise(starts))
        for first in range(begin, end, tile_tokens)
    ]
    if not tiles:
        return out, lse
    offsets = torch.arange(tile_tokens, device=q.device)
    rows, firsts, counts, positions = torch.tensor(tiles, device=q.device).T
    live = offsets < counts[:, None]
    where = torch.where(live, firsts[:, None] + offsets, 0)
    position = torch.where(live, positions[:, None] + offsets, -1)

    wide = q.to(dtype) if q_scale is None else q.to(dtype) * q_scale.to(dtype).reshape(tokens, heads, 1)
    q_tiles = wide[where] * scale
    q_tiles = q_tiles.reshape(-1, tile_tokens, kv_heads, group, head_dim).permute(0, 2, 1, 3, 4)
    q_tiles = q_tiles.reshape(len(tiles), kv_heads, tile_tokens * group, head_dim)
    row_position = position.repeat_interleave(group, dim=1)

    maximum = torch.full(q_tiles.shape[:3], float("-inf"), dtype=dtype, device=q.device)
    total = torch.zeros_like(maximum)
    acc = torch.zeros_like(q_tiles)
    last = position.max(dim=1).values
    oldest = (position.masked_fill(position < 0, 1 << 30).min(dim=1).values - window + 1) if window else None
    k_factor = 1.0 if k_scale is None else k_scale.to(dtype).reshape(1, 1, -1, 1, 1)
    for first_page in range(0, int(last.max()) // PAGE + 1, _SEGMENT_PAGES):
        begin, end = first_page * PAGE, (first_page + _SEGMENT_PAGES) * PAGE
        seen = last >= begin
        if oldest is not None:
            seen &= oldest < end
        index = seen.nonzero().squeeze(1)
        if not len(index):
            continue
        pages = _segment(block_table, rows[index], first_page, last[index])
        values = _written_values(v_pages[pages].to(dtype), first_page, last[index])
        scores = q_tiles[index, None] @ (k_pages[pages].to(dtype) * k_factor).transpose(3, 4)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        at = row_position[index][:, None, None, :, None]
        token = torch.arange(begin, end, device=q.device).reshape(1, _SEGMENT_PAGES, 1, 1, PAGE)
        visible = token <= at
        if window is not None:
            visible &= token > at - window
        scores = scores.masked_fill(~visible, float("-inf"))
        new_maximum = torch.maximum(maximum[index], scores.amax(dim=(1, 4)))
        finite = new_maximum.masked_fill(new_maximum == float("-inf"), 0.0)
        weights = torch.exp(scores - finite[:, None, :, :, None])
        keep = torch.exp(maximum[index] - finite)
        total[index] = total[index] * keep + weights.sum(dim=(1, 4))
        acc[index] = acc[index] * keep[..., None] + (weights @ values.transpose(3, 4)).sum(dim=1)
        maximum[index] = new_maximum

    if v_scale is not None:
        acc = acc * v_scale.to(dtype).reshape(1, -1, 1, 1)
    result = acc / total.masked_fill(total == 0, 1.0)[..., None]
    log_sum = maximum + torch.log(total)
    result = result.reshape(-1, kv_heads, tile_tokens, group, head_dim).permute(0, 2, 1, 3, 4)
    log_sum = log_sum.reshape(-1, kv_heads, tile_tokens, group).permute(0, 2, 1, 3)
    out[where[live]] = result.reshape(len(tiles), tile_tokens, heads, head_dim)[live]
    lse[where[live]] = log_sum.reshape(len(tiles), tile_tokens, heads)[live]
    return out, lse


def _segment(block_table: Tensor, rows: Tensor, first_page: int, last: Tensor) -> Tensor:
    """Page numbers `[tiles, pages]` of one segment; page 0 stands in where a tile has none."""
    index = first_page + torch.arange(_SEGMENT_PAGES, device=rows.device)
    pages = block_table[rows[:, None], index.clamp(max=block_table.shape[1] - 1)].long()
    return torch.where(index <= (last // PAGE)[:, None], pages, 0)


def _written_values(values: Tensor, first_page: int, last: Tensor) -> Tensor:
    """Zero what lies behind a tile's last token, in place: a weight of zero does not silence a NaN.

    `values` is `[tiles, pages, kv_heads, head_dim, 64]`.
    """
    for i in range(_SEGMENT_PAGES):
        written = last + 1 - (first_page + i) * PAGE
        short = (written < PAGE).nonzero().squeeze(1)
        if len(short):
            column = torch.arange(PAGE, device=last.device)
            unwritten = (column >= written[short, None])[:, None, None, :]
            values[short, i] = values[short, i].masked_fill(unwritten, 0.0)
    return values
