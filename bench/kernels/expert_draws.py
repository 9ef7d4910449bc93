"""Which experts a batch's tokens go to, and how the kernels' errors are taken, so that no row rests on a lucky draw."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["TOP_K", "draw_ids", "hit_experts", "typical_error"]

TOP_K = 8
FEW_TOKENS = 8


def draw_ids(tokens: int, experts: int) -> list[Tensor]:
    """Experts drawn evenly, int32 ``(tokens, 8)`` on the GPU, the same in every process, repeated every 2,048 tokens.

    Only draws that hit as many experts as is to be expected count: with 16 tokens of 192 experts that is 95, a draw
    may hit 87, and what is read, and so the time, follows. Up to 4 tokens hit few experts: twelve draws, so that no
    weight is still in L2 when it comes again.
    """
    rows = min(tokens, 2048)
    expected = round(experts * (1 - (1 - TOP_K / experts) ** rows))
    generator, found = torch.Generator().manual_seed(tokens), list[Tensor]()
    while len(found) < (12 if tokens <= 4 else 1):
        ids = torch.rand(rows, experts, generator=generator).topk(TOP_K).indices.int()
        if hit_experts(ids) == expected:
            found.append(ids.cuda().repeat(max(1, tokens // 2048), 1))
    return found


def hit_experts(ids: Tensor) -> int:
    """How many experts the tokens go to."""
    return len(set(ids.flatten().tolist()))


def typical_error(check: Callable[[], float], tokens: int) -> float:
    """Of a result of few tokens, one e4m3 tie that falls the other way can be 3e-2: the middle of five draws."""
    return statistics.median(check() for _ in range(5)) if tokens <= FEW_TOKENS else check()
