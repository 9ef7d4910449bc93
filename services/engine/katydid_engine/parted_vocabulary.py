"""Sampling where the logits are: ranks of a TP group hold parts of the vocabulary and come to the same tokens; and the
likeliest token of a row, with which all drafts are made, also on one rank alone.

Two ways to sample, both to the tokens of `sample` over whole rows on one rank, bit for bit:

    without filters   each rank takes the best of its part, the noise included, and tells the others (score, id): twelve
                      bytes a row and chunk instead of the logits
    with filters      what top-k, top-p and min-p keep hangs on the whole row; so rows are dealt over the ranks, each
                      gets those that it samples whole, and tells the others their tokens: 1 / n of what a gather sends

No size comes from the device, so that a CUDA graph can hold either.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import torch.nn.functional as F
from katydid_kernels import SamplingBatch, sample
from katydid_kernels.sample_part import best_of_part, best_of_parts
from torch import Tensor

from katydid_engine.collectives import Collectives
from katydid_engine.layers.embedding import LmHead

__all__ = ["likeliest", "sample_parts"]


def sample_parts(
    head: LmHead, group: Collectives, hidden: Tensor, batch: SamplingBatch, *, filters: bool, sound: Tensor
) -> Tensor:
    """Token ids int32 ``[R]``, the same on every rank of ``group``.

    Args:
        hidden: ``[R, hidden]``, the same on every rank.
        batch: without penalties, bias and mask, which one rank alone may know.
        filters: whether a row may have top_k, top_p or min_p set.
        sound: bool ``[R]``, written, as `sample` does.
    """
    logits = head.part(hidden)
    if filters:
        return _of_dealt_rows(head, group, logits, batch, sound)
    told = best_of_part(logits, batch.temperature, batch.seeds, batch.positions, first=head.first, room=head.room)
    tokens, _ = best_of_parts(group.all_gather(told, 1), sound=sound)
    return tokens


def likeliest(head: LmHead, group: Collectives, hidden: Tensor) -> Tensor:
    """The token of each row's largest logit, int32 ``[R]``, the same on every rank of ``group``.

    Args:
        hidden: ``[R, hidden]``, the same on every rank.
    """
    greedy = _greedy(len(hidden), hidden.device)
    if group.size > 1:
        told = best_of_part(
            head.part(hidden), greedy.temperature, greedy.seeds, greedy.positions, first=head.first, room=head.room
        )
        return best_of_parts(group.all_gather(told, 1))[0]
    logits = head(hidden)
    # A GPU's sampler looks at a row with many programs, where argmax has one.
    return sample(logits, greedy) if logits.is_cuda else logits.argmax(dim=-1).to(torch.int32)


@functools.cache
def _greedy(rows: int, device: torch.device) -> SamplingBatch:
    """Kept for good: graphs that were captured with it hold its addresses."""
    zeros, counts = torch.zeros(rows, device=device), torch.zeros(rows, dtype=torch.int32, device=device)
    return SamplingBatch(
        temperature=zeros,
        top_k=counts,
        top_p=torch.ones(rows, device=device),
        min_p=zeros,
        seeds=counts.long(),
        positions=counts,
        filters=False,
        samples=False,
    )


def _of_dealt_rows(head: LmHead, group: Collectives, logits: Tensor, batch: SamplingBatch, sound: Tensor) -> Tensor:
    rows, size = len(logits), group.size
    each = -(-rows // size)
    padded = F.pad(logits, (0, head.room - logits.shape[1], 0, size * each - rows))
    arrived = group.all_to_all(padded).wait().view(size, each, head.room)
    whole = arrived.transpose(0, 1).reshape(each, size * head.room)[:, : head.vocab_size]
    # Rows that only fill up repeat the last one's parameters.
    own = torch.arange(group.rank * each, (group.rank + 1) * each, device=logits.device).clamp(max=rows - 1)
    dealt = replace(
        batch,
        **{
            name: getattr(batch, name)[own] for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
        },
    )
    numbers = torch.empty(each, dtype=torch.bool, device=logits.device)
    tokens = sample(whole, dealt, sound=numbers)
    told = group.all_gather(torch.stack((tokens, numbers.to(torch.int32)), dim=1), 0)[:rows]
    sound.copy_(told[:, 1] != 0)
    return told[:, 0].contiguous()
