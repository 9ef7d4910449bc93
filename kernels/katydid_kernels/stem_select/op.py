"""The public selection checks what comes in and picks the kernels for the device."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from katydid_kernels.prefill_attention.op import check_pages
from katydid_kernels.stem_select.kernels import pool_kernel, score_kernel, select_kernel
from katydid_kernels.stem_select.plan import SparsePlan
from katydid_kernels.stem_select.reference import stem_select_reference

__all__ = ["launch_select", "stem_select"]


def stem_select(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    plan: SparsePlan,
    *,
    scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """Returns the blocks that each tile keeps for each head, int32 ``[tiles, heads, plan.most]``.

    Tiles in the order of the queries; a list holds the tile's number of blocks (`SparsePlan.records`), newest first:
    its own, then those before it. What follows is undefined.

    Args:
        q: ``[tokens, heads, head_dim]``, and pages, table, lengths and scales as `prefill_attention` takes them; the
            new tokens' keys and values lie in the pages already.
        plan: of `sparse_plan` for these rows.
        overlap: let the first kernel start before the preceding one ends (programmatic dependent launch), and wait for
            it; its own launches always overlap so.

    Raises ValueError naming the argument that does not fit.
    """
    check_pages(q, k_pages, v_pages, block_table, context_lens, k_scale, v_scale)
    scales = {"scale": scale, "q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    if not q.is_cuda:
        return stem_select_reference(q, k_pages, v_pages, block_table, plan, **scales)  # type: ignore[arg-type]
    dtype = q.dtype if q.dtype.itemsize > 1 else torch.bfloat16
    early = torch.cuda.get_device_capability(q.device)[0] >= 9
    rows = (q, k_pages, v_pages, block_table, plan, dtype)
    return launch_select(*rows, overlap=overlap and early, chain=early, **scales)  # type: ignore[arg-type]


def launch_select(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, block_table: Tensor, plan: SparsePlan, dtype: torch.dtype, *,
    scale: float | None, q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, overlap: bool = False,
    chain: bool = True,
) -> Tensor:  # fmt: skip
    """``dtype``: of pooled queries and keys, what the tensor cores multiply. ``chain``: each launch starts before the
    one before it ends (off in the interpreter, which knows no such thing).
    """
    _tokens, heads, head_dim = q.shape
    kv_heads, rule, device = k_pages.shape[1], plan.rule, q.device
    scale = head_dim**-0.5 if scale is None else scale
    width = rule.stride * head_dim
    lists = torch.empty(plan.tiles, heads, plan.most, dtype=torch.int32, device=device)
    if plan.tiles == 0:
        return lists
    follows: dict[str, bool] = {"EARLY": chain, "launch_pdl": chain}
    first = {"EARLY": overlap, "launch_pdl": overlap}
    if sum(row.tiles for row in plan.sparse_rows) < plan.tiles:
        select_kernel[(plan.tiles, heads)](
            None, plan.in_order, lists, 0, 0, heads, plan.most, 0, 0, BLOCK=triton.next_power_of_2(plan.most),
            DENSE=True, num_warps=4, **first,
        )  # fmt: skip
        first = follows
    for row in plan.sparse_rows:
        keys = torch.empty(kv_heads, row.blocks, width, dtype=dtype, device=device)
        bias = torch.empty(kv_heads, row.blocks, device=device)
        queries = torch.empty(heads, row.tiles, width, dtype=dtype, device=device)
        scores = torch.empty(heads, row.tiles, row.blocks, device=device)
        pool_kernel[(row.blocks * kv_heads + row.tiles * heads,)](
            k_pages, v_pages, block_table[row.row], keys, bias, k_scale, v_scale, row.length, row.blocks, kv_heads,
            rule.value_weight, q, q_scale, plan.in_order, queries, row.first_tile, row.tiles, heads, scale,
            PER_HEAD=int(k_scale is not None and k_scale.numel() > 1), STRIDE=rule.stride, D=head_dim, num_warps=4,
            **first,
        )  # fmt: skip
        first = follows
        # Of few blocks, narrow tiles: more programs, each with less to read.
        width_n = 64 if row.blocks > 512 else 32
        score_kernel[(triton.cdiv(row.tiles, 64), triton.cdiv(row.blocks, width_n), heads)](
            queries, keys, bias, scores, row.tiles, row.blocks, heads // kv_heads, K=width, BLOCK_M=64,
            BLOCK_N=width_n, BLOCK_K=128 if width % 128 == 0 else 64, num_warps=4, num_stages=4, **follows,
        )  # fmt: skip
        # One warp counts without a barrier, as long as its registers hold a row of scores.
        block = max(32, triton.next_power_of_2(row.blocks))
        select_kernel[(row.tiles, heads)](
            scores, plan.in_order, lists, row.first_tile, row.blocks, heads, plan.most, rule.sink, rule.window,
            BLOCK=block, DENSE=False, num_warps=triton.cdiv(block, 1024), **follows,
        )  # fmt: skip
    return lists
