"""The public prefill call checks what the caller sends; `katydid::prefill_attention` picks what the device can run.

The op writes into tensors it is given, so that torch.compile and graphs see what it changes and nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from katydid_kernels.prefill_attention.launch import PrefillProblem, launch_hopper, launch_tile
from katydid_kernels.prefill_attention.plan import prefill_plan
from katydid_kernels.prefill_attention.reference import PAGE, prefill_attention_reference

__all__ = ["check_pages", "prefill_attention", "result_dtype", "runs_on_hopper"]

_HOPPER_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
_HOPPER_HEAD_DIMS = (64, 128, 256)


def prefill_attention(
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
    plan: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend a ragged batch of new tokens to their paged context.

    Args:
        q: `[tokens, heads, head_dim]`, rows concatenated, contiguous; on a GPU of the pages' dtype (bf16, fp16, e4m3).
        k_pages: `[pages, kv_heads, 64, head_dim]`, v_pages: `[pages, kv_heads, head_dim, 64]`, one dtype, contiguous.
        block_table: int32 `[batch, max_pages]`; entries past a row's last page are never read.
        context_lens: int32 `[batch]`, tokens in the row's pages **with** the new ones; slots past it may hold anything.
        cu_q_lens: int32 `[batch + 1]`, where each row's new tokens begin in `q`; they are the last of its context.
        scale: factor on q.k, by default `head_dim ** -0.5`.
        soft_cap: when given, scores become `soft_cap * tanh(score / soft_cap)`.
        window: when given, a token sees itself and the `window - 1` tokens before it.
        q_scale: fp32 `[tokens, heads]`; k_scale, v_scale: fp32 `[1]` or `[kv_heads]`, both or neither; multiply the
            stored values.
        plan: from `prefill_plan` for the same lengths, made once a step; made here when None.
        out, lse: where to write, q's shape (bf16 for e4m3 queries, else q's dtype) and fp32 `[tokens, heads]`.

    Returns the output and the natural-log sum of exponentials; zeros and -inf for a token with nothing to see.

    Raises ValueError naming the argument that does not fit.
    """
    check_pages(q, k_pages, v_pages, block_table, context_lens, k_scale, v_scale)
    if cu_q_lens.dtype != torch.int32 or cu_q_lens.shape != (len(context_lens) + 1,):
        raise ValueError(
            f"cu_q_lens must be int32 [{len(context_lens) + 1}], got {cu_q_lens.dtype} {list(cu_q_lens.shape)}"
        )
    tokens, _, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.empty_like(q, dtype=result_dtype(q)) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if lse is None else lse
    if tokens == 0:
        return out, lse
    # The op's dispatch takes longer than the launch, most of all with written tensors from outside inference mode.
    attend = torch.ops.katydid.prefill_attention if torch.compiler.is_compiling() else _attend
    attend(
        q,
        k_pages,
        v_pages,
        block_table,
        context_lens,
        cu_q_lens,
        out,
        lse,
        scale,
        soft_cap,
        window,
        q_scale,
        k_scale,
        v_scale,
        plan,
    )
    return out, lse


def _attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_q_lens: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    plan: Tensor | None,
) -> None:
    if q.is_cuda:
        problem = PrefillProblem(
            q, k_pages, v_pages, block_table, out, lse, scale, soft_cap, window, q_scale, k_scale, v_scale
        )
        launch = launch_hopper if runs_on_hopper(q, k_pages) else launch_tile
        launch(problem, prefill_plan(context_lens, cu_q_lens, len(q)) if plan is None else plan)
        return
    result, log_sum = prefill_attention_reference(
        q,
        k_pages,
        v_pages,
        block_table,
        context_lens,
        cu_q_lens,
        scale=scale,
        soft_cap=soft_cap,
        window=window,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    out.copy_(result)
    lse.copy_(log_sum)


_prefill_attention = torch.library.custom_op(
    "katydid::prefill_attention",
    mutates_args=("out", "lse"),
    schema="(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor context_lens, Tensor cu_q_lens, "
    "Tensor(a!) out, Tensor(b!) lse, float scale, float? soft_cap, int? window, Tensor? q_scale, Tensor? k_scale, "
    "Tensor? v_scale, Tensor? plan) -> ()",
)(_attend)


@_prefill_attention.register_fake
def _(*_arguments: object) -> None:
    """Writes into what it is given: nothing to infer."""


def result_dtype(q: Tensor) -> torch.dtype:
    """The dtype attention returns for these queries."""
    return torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype


def runs_on_hopper(q: Tensor, k_pages: Tensor) -> bool:
    """Whether the Gluon kernels take this problem: Hopper, one 8- or 16-bit dtype, head_dim 64, 128 or 256."""
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype == k_pages.dtype
        and q.dtype in _HOPPER_DTYPES
        and q.shape[-1] in _HOPPER_HEAD_DIMS
    )


def check_pages(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """Raise ValueError where queries (`[..., heads, head_dim]`), pages, table, lengths and scales do not fit
    together."""
    heads, head_dim = q.shape[-2:]
    if k_pages.ndim != 4 or k_pages.shape[2:] != (PAGE, head_dim):
        raise ValueError(f"k_pages must be [pages, kv_heads, {PAGE}, {head_dim}], got {list(k_pages.shape)}")
    pages, kv_heads = k_pages.shape[:2]
    if v_pages.shape != (pages, kv_heads, head_dim, PAGE):
        raise ValueError(f"v_pages must be [{pages}, {kv_heads}, {head_dim}, {PAGE}], got {list(v_pages.shape)}")
    if v_pages.dtype != k_pages.dtype:
        raise ValueError(f"v_pages must have k_pages' dtype {k_pages.dtype}, got {v_pages.dtype}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q's heads must be a multiple of kv_heads {kv_heads}, got {heads}")
    for name, tensor in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    if context_lens.dtype != torch.int32 or context_lens.ndim != 1:
        raise ValueError(f"context_lens must be int32 [batch], got {context_lens.dtype} {list(context_lens.shape)}")
    batch = len(context_lens)
    if block_table.dtype != torch.int32 or block_table.ndim != 2 or len(block_table) != batch:
        raise ValueError(
            f"block_table must be int32 [{batch}, max_pages], got {block_table.dtype} {list(block_table.shape)}"
        )
    if (k_scale is None) != (v_scale is None):
        raise ValueError("k_scale and v_scale must be given together")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and scale.numel() not in (1, kv_heads):
            raise ValueError(f"{name} must have 1 or {kv_heads} elements, got {scale.numel()}")
