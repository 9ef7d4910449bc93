"""Speculative verification: which of the tokens sampled at drafted positions are the sequence's own.

The target has sampled all Q positions of a row, position j as if the drafts before it were accepted: with Gumbel-max
under Philox(seed, position) what it samples there is what it would sample without drafts. So a row keeps its samples up
to and including the first that differs from its draft, and the tokens are those of plain decoding. For a deterministic
draft that is rejection sampling's acceptance exactly (Leviathan et al., "Fast inference from transformers via
speculative decoding", 2023): a draft d is accepted with the probability that the target gives it.

    accepted[r] = 1 + the largest n with sampled[r, j] == drafts[r, j] for all j < n

The counts stay on the device, for `advance`; the host reads them a step later. The same launch leaves what `advance`
reads where the next step looks for it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from katydid_kernels.advance import Sampled
from katydid_kernels.sample.batch import IN_PROMPT

__all__ = ["verify_draft", "verify_draft_reference"]


def verify_draft(
    sampled: Tensor,
    drafts: Tensor,
    *,
    num_drafts: Tensor | None = None,
    slots: Tensor | None = None,
    seen: Tensor | None = None,
    first_positions: Tensor | None = None,
    left: Sampled | None = None,
    overlap: bool = False,
) -> Tensor:
    """Returns how many of each row's samples are its own, int32 ``[R]`` in 1 .. Q, and counts these as output.

    Args:
        sampled: int32 ``[R, Q]``, the target's token at each position.
        drafts: int32 ``[R, Q - 1]``, what was fed after the row's newest token: ``drafts[r, j]`` stood where
            ``sampled[r, j]`` was predicted. A negative draft is never accepted.
        num_drafts: int32 ``[R]``, only the first so many drafts of a row count (0 for a row that ends a prompt and has
            one sample, in column 0); None for all Q - 1.
        slots, seen: as in `Penalties`, both or neither: the accepted tokens are added to the counts of their row, in
            place. Rows with negative slots are left out.
        first_positions, left: both or neither: int32 ``[R]``, index in its sequence of the token in column 0, and where
            samples, counts and these positions are written for the next step: its first R rows and Q columns. The
            counts returned are then ``left.accepted[:R]``, and nothing is allocated.
        overlap: let the kernel start before the preceding one ends (programmatic dependent launch), and wait for it.

    Raises ValueError for shapes and dtypes that do not fit.
    """
    rows, width = sampled.shape
    if drafts.shape != (rows, width - 1):
        raise ValueError(f"drafts must be [{rows}, {width - 1}], got {list(drafts.shape)}")
    for name, ids in (("sampled", sampled), ("drafts", drafts)):
        if ids.dtype != torch.int32:
            raise ValueError(f"{name} must be int32, got {ids.dtype}")
    if (slots is None) != (seen is None):
        raise ValueError("slots and seen must be given together")
    if (first_positions is None) != (left is None):
        raise ValueError("first_positions and left must be given together")
    if left is not None and (left.tokens.shape[0] < rows or left.tokens.shape[1] < width):
        raise ValueError(f"left.tokens must be at least [{rows}, {width}], got {list(left.tokens.shape)}")
    if not sampled.is_cuda:
        return verify_draft_reference(
            sampled, drafts, num_drafts=num_drafts, slots=slots, seen=seen, first_positions=first_positions, left=left
        )
    return launch(sampled, drafts, num_drafts, slots, seen, first_positions, left, overlap=overlap)


def launch(
    sampled: Tensor,
    drafts: Tensor,
    num_drafts: Tensor | None,
    slots: Tensor | None,
    seen: Tensor | None,
    first_positions: Tensor | None = None,
    left: Sampled | None = None,
    *,
    overlap: bool = False,
) -> Tensor:
    rows, width = sampled.shape
    if left is None:
        accepted = torch.empty(rows, dtype=torch.int32, device=sampled.device)
        kept: tuple[Any, ...] = (None, None, None, 0, 0)
    else:
        accepted = left.accepted[:rows]
        assert first_positions is not None
        kept = (first_positions, left.tokens, left.first_positions, first_positions.stride(0), left.tokens.stride(0))
    if rows:
        _verify_draft_kernel[(rows,)](
            sampled, drafts, num_drafts, slots, seen, accepted, *kept, sampled.stride(0), drafts.stride(0),
            0 if seen is None else seen.stride(0), Q=width, EARLY=overlap, num_warps=1,
            **({"launch_pdl": True} if overlap else {}),
        )  # fmt: skip
    return accepted


@triton.jit(do_not_specialize=["first_stride", "left_stride", "sampled_stride", "drafts_stride"])
def _verify_draft_kernel(
    sampled_ptr, drafts_ptr, num_drafts_ptr, slots_ptr, seen_ptr, accepted_ptr, first_ptr, left_ptr, left_first_ptr,
    first_stride, left_stride, sampled_stride, drafts_stride, seen_stride, Q: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    limit = Q - 1
    if num_drafts_ptr is not None:
        limit = tl.load(num_drafts_ptr + row)
    accepted = 1
    going = True
    for j in tl.static_range(Q - 1):
        same = tl.load(sampled_ptr + row * sampled_stride + j) == tl.load(drafts_ptr + row * drafts_stride + j)
        going = going & same & (j < limit)
        accepted += going.to(tl.int32)
    tl.store(accepted_ptr + row, accepted)
    if left_ptr is not None:
        for j in tl.static_range(Q):
            tl.store(left_ptr + row * left_stride + j, tl.load(sampled_ptr + row * sampled_stride + j))
        tl.store(left_first_ptr + row, tl.load(first_ptr + row * first_stride))
    if seen_ptr is not None:
        slot = tl.load(slots_ptr + row)
        # One after the other: a token may be accepted twice.
        for j in tl.static_range(Q):
            if (slot >= 0) & (j < accepted):
                place = seen_ptr + slot.to(tl.int64) * seen_stride + tl.load(sampled_ptr + row * sampled_stride + j)
                entry = tl.load(place)
                tl.store(place, tl.where((entry & 0x7FFF) == 0x7FFF, entry, entry + 1).to(tl.int16))


def verify_draft_reference(
    sampled: Tensor,
    drafts: Tensor,
    *,
    num_drafts: Tensor | None = None,
    slots: Tensor | None = None,
    seen: Tensor | None = None,
    first_positions: Tensor | None = None,
    left: Sampled | None = None,
) -> Tensor:
    same = sampled[:, :-1] == drafts
    if num_drafts is not None:
        same &= torch.arange(drafts.shape[1], device=drafts.device) < num_drafts[:, None]
    accepted = 1 + same.to(torch.int32).cumprod(1).sum(1).to(torch.int32)
    if slots is not None and seen is not None:
        own = (torch.arange(sampled.shape[1], device=sampled.device) < accepted[:, None]) & (slots >= 0)[:, None]
        at, columns = own.nonzero(as_tuple=True)
        counts = torch.zeros_like(seen, dtype=torch.int32)
        ones = torch.ones(len(at), dtype=torch.int32, device=seen.device)
        counts.index_put_((slots[at].long(), sampled[at, columns].long()), ones, accumulate=True)
        total = ((seen & ~IN_PROMPT) + counts).clamp(max=~IN_PROMPT)
        seen.copy_(total | (seen & IN_PROMPT))
    if left is not None and first_positions is not None:
        rows, width = sampled.shape
        left.tokens[:rows, :width] = sampled
        left.first_positions[:rows] = first_positions
        return left.accepted[:rows].copy_(accepted)
    return accepted
