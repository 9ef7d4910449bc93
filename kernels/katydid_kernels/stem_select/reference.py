"""The selection in plain torch: what the kernels must equal, and what runs on a machine with no GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from katydid_kernels.stem_select.budget import BLOCK, StemRule
from katydid_kernels.stem_select.plan import SparsePlan

__all__ = ["pooled_keys_reference", "stem_select_reference"]


def stem_select_reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    plan: SparsePlan,
    *,
    scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    _tokens, heads, head_dim = q.shape
    kv_heads, rule = k_pages.shape[1], plan.rule
    scale = head_dim**-0.5 if scale is None else scale
    result = torch.full((plan.tiles, heads, plan.most), -1, dtype=torch.int32, device=q.device)
    records = plan.in_order.tolist()
    for tile, record in enumerate(records):
        block = record[3] // BLOCK
        if record[7] < 0:
            result[tile, :, : block + 1] = torch.arange(block, -1, -1, dtype=torch.int32, device=q.device)
    for sparse in plan.sparse_rows:
        tiles = records[sparse.first_tile : sparse.first_tile + sparse.tiles]
        table, length = block_table[sparse.row], tiles[0][4]
        keys, bias = pooled_keys_reference(k_pages, v_pages, table, length, rule, k_scale, v_scale, dtype)
        for tile in tiles:
            block, wanted = tile[3] // BLOCK, tile[5]
            queries = q[tile[1] : tile[2]].to(dtype)
            if q_scale is not None:
                queries = queries * q_scale[tile[1] : tile[2]].to(dtype).unsqueeze(-1)
            place = (tile[3] + torch.arange(len(queries), device=q.device)) % rule.stride
            pooled = torch.zeros(rule.stride, heads, head_dim, dtype=dtype, device=q.device)
            pooled = pooled.index_add_(0, place, queries).transpose(0, 1).reshape(kv_heads, -1, rule.stride * head_dim)
            pooled = pooled * (scale * rule.stride**2 / (BLOCK * len(queries)))
            scores = (pooled @ keys[:, : block + 1].transpose(1, 2) + bias[:, None, : block + 1]).reshape(heads, -1)
            forced = torch.arange(block + 1, device=q.device)
            forced = (forced < rule.sink) | (forced >= block - rule.window)
            newest_first = scores.masked_fill(forced, torch.inf).flip(1)
            best = newest_first.sort(dim=1, descending=True, stable=True).indices[:, :wanted].sort(dim=1).values
            result[tile[6], :, :wanted] = (block - best).int()
    return result


def pooled_keys_reference(
    k_pages: Tensor, v_pages: Tensor, table: Tensor, length: int, rule: StemRule, k_scale: Tensor | None,
    v_scale: Tensor | None, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One row's keys as the scores read them, ``[kv_heads, blocks, stride * head_dim]``, and its value terms,
    ``[kv_heads, blocks]``.
    """
    _pages, kv_heads, page, head_dim = k_pages.shape
    blocks = -(-length // BLOCK)
    pages = table[: -(-length // page)].long()
    keys = k_pages[pages].to(dtype).transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :length]
    values = v_pages[pages].to(dtype).permute(1, 0, 3, 2).reshape(kv_heads, -1, head_dim)[:, :length]
    if k_scale is not None and v_scale is not None:
        keys = keys * k_scale.to(dtype).reshape(-1, 1, 1)
        values = values * v_scale.to(dtype).reshape(-1, 1, 1)
    padding = (0, 0, 0, blocks * BLOCK - length)
    keys = torch.nn.functional.pad(keys, padding).reshape(kv_heads, blocks, -1, rule.stride, head_dim)
    norms = torch.nn.functional.pad(values, padding).square().sum(-1).reshape(kv_heads, blocks, BLOCK).amax(-1).sqrt()
    bias = rule.value_weight * norms.clamp(min=1.0).log()
    return keys.sum(2).flip(2).flatten(2), bias
