"""The public decode call checks what the caller sends; `katydid::decode_attention` picks what the device can run.

The op writes into tensors it is given, so that torch.compile and graphs see what it changes and nothing else.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from katydid_kernels.decode_attention.launch import (
    DecodeProblem,
    DecodeScratch,
    decode_ctas,
    launch_hopper,
    launch_split,
)
from katydid_kernels.decode_attention.reference import decode_attention_reference
from katydid_kernels.decode_plan import decode_plan
from katydid_kernels.prefill_attention.op import check_pages, result_dtype, runs_on_hopper
from katydid_kernels.quantize_rows import quantize_fp8

__all__ = ["MAX_Q_LEN", "decode_attention"]

MAX_Q_LEN = 8


def decode_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: Tensor | None = None,
    scratch: DecodeScratch | None = None,
    overlap: bool = False,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend the newest `q_len` tokens of every request to its paged context.

    Args:
        q: `[batch, q_len, heads, head_dim]`, q_len 1..8, contiguous; on a GPU of the pages' dtype (bf16, fp16, e4m3).
        k_pages: `[pages, kv_heads, 64, head_dim]`, v_pages: `[pages, kv_heads, head_dim, 64]`, one dtype, contiguous.
        block_table: int32 `[batch, max_pages]`; entries past a row's last page are never read.
        context_lens: int32 `[batch]`, tokens in the row's pages **with** the new ones; slots past it may hold anything.
        scale: factor on q.k, by default `head_dim ** -0.5`.
        soft_cap: when given, scores become `soft_cap * tanh(score / soft_cap)`.
        window: when given, a token sees itself and the `window - 1` tokens before it.
        q_scale: fp32 `[batch, q_len, heads]`; k_scale, v_scale: fp32 `[1]` or `[kv_heads]`, both or neither; multiply
            the stored values.
        plan: from `decode_plan` for the same lengths, q_len, window and (where it was given) block table, made once a
            step; made here when None.
        scratch: of this stream, for the plan's CTAs; allocated here when None, so pass one inside captured graphs.
        overlap: let the kernel start before the preceding one ends (programmatic dependent launch).  Then plan,
            block_table, context_lens and every page without a new token must be older than the preceding kernel.
        out, lse: where to write, q's shape (bf16 for e4m3 queries, else q's dtype) and fp32 `[batch, q_len, heads]`.
        out_scale: fp32 `[batch, q_len]`, with an `out` in e4m3: the output is quantised with a scale a token, as
            `quantize_fp8` would quantise the token's row of all heads; for one kv head, whose CTA has a token whole.

    Returns the output and the natural-log sum of exponentials.  A token with nothing to see (a row of length zero)
    gives zeros and -inf.

    Raises ValueError naming the argument that does not fit.
    """
    if q.ndim != 4 or not 1 <= q.shape[1] <= MAX_Q_LEN:
        raise ValueError(f"q must be [batch, q_len, heads, head_dim] with q_len 1..{MAX_Q_LEN}, got {list(q.shape)}")
    check_pages(q, k_pages, v_pages, block_table, context_lens, k_scale, v_scale)
    batch, head_dim = q.shape[0], q.shape[3]
    if batch != len(context_lens):
        raise ValueError(f"q must have context_lens' batch {len(context_lens)}, got {batch}")
    scale = head_dim**-0.5 if scale is None else scale
    if out_scale is not None:
        _check_quantized(q, k_pages, out, out_scale)
    out = torch.empty_like(q, dtype=result_dtype(q)) if out is None else out
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if lse is None else lse
    if batch == 0:
        return out, lse
    if overlap and plan is None:
        raise ValueError("overlap needs a plan that is older than the preceding kernel, got none")
    # The op's dispatch takes longer than the launch, most of all with written tensors from outside inference mode.
    attend = torch.ops.katydid.decode_attention if torch.compiler.is_compiling() else _attend
    attend(
        q,
        k_pages,
        v_pages,
        block_table,
        context_lens,
        out,
        lse,
        scale,
        soft_cap,
        window,
        q_scale,
        k_scale,
        v_scale,
        plan,
        None if scratch is None else scratch.partial,
        None if scratch is None else scratch.stats,
        None if scratch is None else scratch.counters,
        overlap,
        out_scale,
    )
    return out, lse


def _check_quantized(q: Tensor, k_pages: Tensor, out: Tensor | None, out_scale: Tensor) -> None:
    group = q.shape[2] // k_pages.shape[1]
    if k_pages.shape[1] != 1 or group & (group - 1):
        raise ValueError(f"out_scale needs one kv head and a group of 2^n heads, got {k_pages.shape[1]} and {group}")
    if out is None or out.dtype != torch.float8_e4m3fn:
        raise ValueError(f"out must be float8_e4m3fn beside out_scale, got {None if out is None else out.dtype}")
    if out_scale.shape != q.shape[:2] or out_scale.dtype != torch.float32 or not out_scale.is_contiguous():
        raise ValueError(f"out_scale must be fp32 {list(q.shape[:2])}, contiguous, got {list(out_scale.shape)}")


def _attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    soft_cap: float | None,
    window: int | None,
    q_scale: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    plan: Tensor | None,
    partial: Tensor | None,
    stats: Tensor | None,
    counters: Tensor | None,
    overlap: bool,
    out_scale: Tensor | None,
) -> None:
    problem = DecodeProblem(
        q, k_pages, v_pages, block_table, context_lens, out, lse, scale, soft_cap, window, q_scale, k_scale, v_scale,
        out_scale,
    )  # fmt: skip
    if not q.is_cuda:
        result, log_sum = decode_attention_reference(
            q,
            k_pages,
            v_pages,
            block_table,
            context_lens,
            scale=scale,
            soft_cap=soft_cap,
            window=window,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        lse.copy_(log_sum)
        _write(result, out, out_scale)
        return
    kv_heads, q_len = k_pages.shape[1], q.shape[1]
    if plan is None:
        ctas = decode_ctas(q.device)
        plan = decode_plan(context_lens, kv_heads, ctas=ctas, q_len=q_len, window=window, block_table=block_table)
    if partial is None or stats is None or counters is None:
        scratch = DecodeScratch.allocate(len(plan), q_len, q.shape[2] // kv_heads, q.shape[3], q.device)
    else:
        scratch = DecodeScratch(partial, stats, counters)
    if runs_on_hopper(q, k_pages):
        launch_hopper(problem, plan, scratch, overlap=overlap)
    elif out_scale is None:
        launch_split(problem, plan, scratch)
    else:
        result = torch.empty_like(q, dtype=result_dtype(q))
        launch_split(replace(problem, out=result), plan, scratch)
        _write(result, out, out_scale)


def _write(result: Tensor, out: Tensor, out_scale: Tensor | None) -> None:
    if out_scale is None:
        out.copy_(result)
    else:
        quantize_fp8(result.flatten(0, 1).flatten(1), out=(out.flatten(0, 1).flatten(1), out_scale.flatten()))


_decode_attention = torch.library.custom_op(
    "katydid::decode_attention",
    mutates_args=("out", "lse", "partial", "stats", "counters", "out_scale"),
    schema="(Tensor q, Tensor k_pages, Tensor v_pages, Tensor block_table, Tensor context_lens, Tensor(a!) out, "
    "Tensor(b!) lse, float scale, float? soft_cap, int? window, Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, "
    "Tensor? plan, Tensor(c!)? partial, Tensor(d!)? stats, Tensor(e!)? counters, bool overlap, "
    "Tensor(f!)? out_scale) -> ()",
)(_attend)


@_decode_attention.register_fake
def _(*_arguments: object) -> None:
    """Writes into what it is given: nothing to infer."""
