"""The router's fp32 weight as bf16 terms, split once when a model is loaded.

    W = W_1 + W_2 (+ W_3),   W_1 = bf16(W),   W_2 = bf16(W - W_1),   W_3 = bf16(W - W_1 - W_2)

Two terms keep 16 of the 24 bits of a weight, three keep all of them (Henry, Tang and Heinecke, "Leveraging the bfloat16
artificial intelligence datatype for higher-precision computations", arXiv 1904.06376). A published form stores
256 W_2; bf16 has the exponents of fp32, so the factor changes no bit of the product and is left out.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["FEW_TOKENS", "MOST_TILES", "RouterWeight", "experts_per_tile", "split_into_bf16"]

CHUNK_EXPERTS = 64
BLOCK_K = 64
# Up to so many tokens take the kernel of one slice of K a CTA, at least a block long.
FEW_TOKENS = 64
MOST_TILES = 1024


@dataclass(frozen=True)
class OnHopper:
    """What the kernels work with.

    terms: bf16 ``[terms, padded experts, hidden]``, rows past the experts zero.
    handover: int32, -1 between calls, where CTAs leave partial logits of few tokens; shared by weights of one shape.
    counters: int32, zero between calls, where CTAs of a tile of many tokens meet; shared likewise.
    """

    terms: Tensor
    handover: Tensor
    counters: Tensor


@dataclass(frozen=True)
class RouterWeight:
    """A router's weight, ready for `router`. Make it with `prepare`, once, outside of captured graphs.

    weight: fp32 ``[experts, hidden]``, what the reference computes with.
    hopper: None on a device without the kernels. Its scratch serves one stream at a time.
    """

    weight: Tensor
    hopper: OnHopper | None

    @staticmethod
    def prepare(weight: Tensor, *, terms: Literal[2, 3] = 2) -> RouterWeight:
        """Splits fp32 ``[experts, hidden]`` where the device of `weight` has kernels for it.

        Args:
            terms: bf16 terms; 3 is exact and slower.

        Raises ValueError for a weight that is not an fp32 matrix.
        """
        if weight.ndim != 2 or weight.dtype != torch.float32:
            raise ValueError(f"weight must be fp32 [experts, hidden], got {weight.dtype} {list(weight.shape)}")
        if not weight.is_cuda or torch.cuda.get_device_capability(weight.device) != (9, 0):
            return RouterWeight(weight, None)
        parts = split_into_bf16(weight, terms)
        slices = -(-weight.shape[1] // BLOCK_K)
        return RouterWeight(weight, OnHopper(parts, *_scratch(weight.device, slices * FEW_TOKENS * parts.shape[1])))


@functools.cache
def _scratch(device: torch.device, words: int) -> tuple[Tensor, Tensor]:
    return (
        torch.full((words,), -1, dtype=torch.int32, device=device),
        torch.zeros(MOST_TILES, dtype=torch.int32, device=device),
    )


def split_into_bf16(weight: Tensor, terms: int) -> Tensor:
    """bf16 ``[terms, padded experts, hidden]`` whose sum over terms is `weight`, exactly for three terms."""
    experts, hidden = weight.shape
    padded = experts_per_tile(experts) * -(-experts // experts_per_tile(experts))
    out = torch.zeros(terms, padded, hidden, dtype=torch.bfloat16, device=weight.device)
    rest = weight
    for term in range(terms):
        out[term, :experts] = rest.to(torch.bfloat16)
        rest = rest - out[term, :experts].float()
    return out


def experts_per_tile(experts: int) -> int:
    """64, 128 or 192: the experts are cut into the fewest equal tiles of at most 192."""
    chunks = -(-experts // CHUNK_EXPERTS)
    tiles = -(-chunks // 3)
    return CHUNK_EXPERTS * -(-chunks // tiles)
