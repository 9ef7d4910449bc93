"""The inputs of a decode step, rewritten on the device from what the step before accepted.

The host prepares step n + 1 while the device runs step n, so it does not know how long the rows are; it knows where
each row came from, and has given it pages for the largest length. A row of step n whose first sample has position f
and that accepted a tokens continues at position f + a - 1 with its newest token, then its drafts:

    token_ids[i]    = sampled[s, a - 1], drafts[s, 0], ..., drafts[s, Q - 2]          s = previous[i]
    positions[i, j] = f[s] + a[s] - 1 + j         context_lens[i] = f[s] + a[s] - 1 + Q
    slots[i, j]     = table[i, positions / 64] * 64 + positions % 64

All values are absolute: they do not depend on what the host assumed, nor on how many steps it is behind.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["Sampled", "StepInputs", "advance", "advance_reference"]

PAGE = 64


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step left on the device, R rows of at most Q samples each.

    Attributes:
        tokens: int32 ``[R, Q]``, the target's samples.
        accepted: int32 ``[R]``, of `verify_draft`: so many are the row's own; 1 where a prompt ended.
        first_positions: int32 ``[R]``, index in its sequence of the token in column 0.
        drafts: int32 ``[R, D]``, what the draft layers predict after the row's newest token; None without any.
    """

    tokens: Tensor
    accepted: Tensor
    first_positions: Tensor
    drafts: Tensor | None = None


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of the S decode rows of a step, Q tokens each, as the host prepared them; rewritten in place.

    Attributes:
        token_ids, positions, slot_mapping: int32 ``[S * Q]``.
        context_lens: int32 ``[S]``.
        block_table: int32 ``[S, pages]``, read; it must cover the largest length.
        sample_positions: int32 ``[S * Q]``, index in its sequence of the token sampled after each input token.
        limits: int32 ``[S]``, tokens that the row's pages hold: what lies at or behind it is not stored (slot -1).
        pending: int32 ``[S * Q, Q - 1]``, of `Penalties`: the drafts before each position; None without penalties.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    context_lens: Tensor
    block_table: Tensor
    sample_positions: Tensor
    limits: Tensor
    pending: Tensor | None = None


def advance(step: StepInputs, before: Sampled, previous: Tensor, *, overlap: bool = False) -> None:
    """Writes into ``step`` the rows that continue one of ``before``; others stay as the host wrote them.

    Args:
        previous: int32 ``[S]``, the row of ``before`` that each row continues; negative for a row that the host knows.
        overlap: let the kernel start before the preceding one ends (programmatic dependent launch), and wait for it.

    Drafts that ``before`` lacks (D < Q - 1) become token 0: give `verify_draft` so many ``num_drafts``.

    Raises ValueError for shapes that do not fit.
    """
    rows = len(previous)
    if step.context_lens.shape != (rows,) or (rows and step.token_ids.numel() % rows):
        raise ValueError(
            f"previous has {rows} rows, context_lens {len(step.context_lens)} and {step.token_ids.numel()} tokens"
        )
    for name in ("positions", "slot_mapping", "sample_positions"):
        if getattr(step, name).shape != step.token_ids.shape:
            raise ValueError(f"{name} must be {list(step.token_ids.shape)}, got {list(getattr(step, name).shape)}")
    if rows == 0:
        return
    width = step.token_ids.numel() // rows
    if step.pending is not None and step.pending.shape != (rows * width, width - 1):
        raise ValueError(f"pending must be [{rows * width}, {width - 1}], got {list(step.pending.shape)}")
    if not step.token_ids.is_cuda:
        advance_reference(step, before, previous)
        return
    launch(step, before, previous, overlap=overlap)


def launch(step: StepInputs, before: Sampled, previous: Tensor, *, overlap: bool = False) -> None:
    rows = len(previous)
    width = step.token_ids.numel() // rows
    depth = 0 if before.drafts is None else before.drafts.shape[1]
    _advance_kernel[(rows,)](
        previous, before.tokens, before.accepted, before.first_positions, before.drafts, step.token_ids,
        step.positions, step.slot_mapping, step.context_lens, step.block_table, step.sample_positions, step.limits,
        step.pending, before.tokens.stride(0), 0 if before.drafts is None else before.drafts.stride(0),
        step.block_table.stride(0), depth, Q=width, BLOCK_Q=triton.next_power_of_2(width), EARLY=overlap,
        num_warps=1, **({"launch_pdl": True} if overlap else {}),
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens_stride", "drafts_stride", "table_stride", "depth"])
def _advance_kernel(
    previous_ptr, tokens_ptr, accepted_ptr, first_ptr, drafts_ptr, ids_ptr, positions_ptr, slots_ptr, lens_ptr,
    table_ptr, sample_positions_ptr, limits_ptr, pending_ptr, tokens_stride, drafts_stride, table_stride, depth,
    Q: tl.constexpr, BLOCK_Q: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    source = tl.load(previous_ptr + row)
    if source >= 0:
        last = tl.load(accepted_ptr + source) - 1
        start = tl.load(first_ptr + source) + last
        j = tl.arange(0, BLOCK_Q)
        inside = j < Q
        ids = tl.load(tokens_ptr + source.to(tl.int64) * tokens_stride + last + j * 0)
        if drafts_ptr is not None:
            drafted = (j > 0) & (j <= depth) & inside
            drafts = tl.load(drafts_ptr + source.to(tl.int64) * drafts_stride + j - 1, mask=drafted, other=0)
            ids = tl.where(j > 0, drafts, ids)
        else:
            ids = tl.where(j > 0, 0, ids)
        at = start + j
        stored = inside & (at < tl.load(limits_ptr + row))
        page = tl.load(table_ptr + row.to(tl.int64) * table_stride + at // 64, mask=stored, other=0)
        place = row * Q + j
        tl.store(ids_ptr + place, ids, mask=inside)
        tl.store(positions_ptr + place, at, mask=inside)
        tl.store(sample_positions_ptr + place, at + 1, mask=inside)
        tl.store(slots_ptr + place, tl.where(stored, page * 64 + at % 64, -1), mask=inside)
        tl.store(lens_ptr + row, start + Q)
        if pending_ptr is not None:
            # Row j counts the drafts 0 .. j - 1, which are this step's inputs 1 .. j.
            for d in tl.static_range(Q - 1):
                draft = tl.sum(tl.where(j == d + 1, ids, 0), 0)
                target = pending_ptr + place * (Q - 1) + d
                tl.store(target, tl.where(d < j, draft, -1), mask=inside)


def advance_reference(step: StepInputs, before: Sampled, previous: Tensor) -> None:
    rows = (previous >= 0).nonzero().squeeze(1)
    if not len(rows):
        return
    source = previous[rows].long()
    width = step.token_ids.numel() // len(previous)
    last = before.accepted[source] - 1
    start = before.first_positions[source] + last
    ids = torch.zeros(len(rows), width, dtype=torch.int32, device=rows.device)
    ids[:, 0] = before.tokens[source, last.long()]
    if before.drafts is not None:
        depth = min(width - 1, before.drafts.shape[1])
        ids[:, 1 : 1 + depth] = before.drafts[source, :depth]
    at = start[:, None] + torch.arange(width, dtype=torch.int32, device=rows.device)
    stored = at < step.limits[rows][:, None]
    index = (at // PAGE).clamp(max=step.block_table.shape[1] - 1).long()
    slots = step.block_table[rows[:, None], index] * PAGE + at % PAGE
    step.token_ids.view(-1, width)[rows] = ids
    step.positions.view(-1, width)[rows] = at
    step.sample_positions.view(-1, width)[rows] = at + 1
    step.slot_mapping.view(-1, width)[rows] = torch.where(stored, slots, -1)
    step.context_lens[rows] = start + width
    if step.pending is not None:
        j = torch.arange(width, device=rows.device)
        pending = torch.where(j[:-1] < j[:, None], ids[:, None, 1:], -1)
        step.pending.view(len(previous), width, width - 1)[rows] = pending
