"""The public call checks what the caller sends and picks what the device can run."""

from __future__ import annotations

import torch
from torch import Tensor

from katydid_kernels.block_sparse_prefill.launch import SparseProblem, launch_hopper, launch_tile
from katydid_kernels.block_sparse_prefill.reference import block_sparse_prefill_reference
from katydid_kernels.prefill_attention.op import check_pages, result_dtype, runs_on_hopper
from katydid_kernels.stem_select.plan import SparsePlan

__all__ = ["block_sparse_prefill"]


def block_sparse_prefill(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    plan: SparsePlan,
    blocks: Tensor,
    *,
    scale: float | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend a ragged batch of new tokens to the listed blocks of their paged context.

    Args:
        q, k_pages, v_pages, block_table, context_lens, scale, q_scale, k_scale, v_scale: as in `prefill_attention`.
        plan: of `sparse_plan` for these rows; it and ``block_table`` are older than the preceding kernel, before whose
            end this one starts.
        blocks: int32 ``[tiles, heads, at least plan.most]`` of `stem_select`: each list holds as many blocks as its
            tile keeps, the tile's own first, none twice, none after its own.
        out: where to write, q's shape (bf16 for e4m3 queries, else q's dtype).

    Raises ValueError naming the argument that does not fit.
    """
    check_pages(q, k_pages, v_pages, block_table, context_lens, k_scale, v_scale)
    tokens, heads, head_dim = q.shape
    if blocks.dtype != torch.int32 or blocks.shape[:2] != (plan.tiles, heads) or blocks.shape[2] < plan.most:
        raise ValueError(
            f"blocks must be int32 [{plan.tiles}, {heads}, {plan.most}], got {blocks.dtype} {list(blocks.shape)}"
        )
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.empty_like(q, dtype=result_dtype(q)) if out is None else out
    if tokens == 0:
        return out
    if q.is_cuda:
        problem = SparseProblem(
            q, k_pages, v_pages, block_table, plan, blocks.contiguous(), out, scale, q_scale, k_scale, v_scale
        )
        launch = launch_hopper if runs_on_hopper(q, k_pages) and head_dim <= 128 else launch_tile
        launch(problem)
        return out
    result = block_sparse_prefill_reference(
        q, k_pages, v_pages, block_table, plan, blocks, scale=scale, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale
    )
    return out.copy_(result)
