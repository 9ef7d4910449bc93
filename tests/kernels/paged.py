"""Random paged KV caches for the attention tests: pages in random order, every slot that nothing wrote is NaN."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


class Pages(NamedTuple):
    k: Tensor
    v: Tensor
    table: Tensor
    lens: Tensor


def make_pages(
    lens: list[int], kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> Pages:
    generator = torch.Generator(device=device).manual_seed(seed)
    counts = [-(-length // 64) for length in lens]
    pages = sum(counts) + 3

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    k, v = rand(pages, kv_heads, 64, head_dim), rand(pages, kv_heads, head_dim, 64)
    order = torch.randperm(pages, generator=generator, device=device).int()
    table = torch.full((len(lens), max([1, *counts])), -1, dtype=torch.int32, device=device)
    used = 0
    for row, (length, count) in enumerate(zip(lens, counts, strict=True)):
        table[row, :count] = order[used : used + count]
        used += count
        if length % 64:
            poison(k[table[row, count - 1].long(), :, length % 64 :, :])
            poison(v[table[row, count - 1].long(), :, :, length % 64 :])
    for page in order[used:].tolist():
        poison(k[page])
        poison(v[page])
    return Pages(k, v, table, torch.tensor(lens, dtype=torch.int32, device=device))


def poison(slots: Tensor) -> None:
    if slots.dtype == FP8:
        slots.view(torch.uint8).fill_(0x7F)
    else:
        slots.fill_(float("nan"))


def dense(pages: Pages, row: int) -> tuple[Tensor, Tensor]:
    """One row's keys and values as `[kv_heads, tokens, head_dim]` float64, gathered token by token."""
    slots = [(int(pages.table[row, t // 64]), t % 64) for t in range(int(pages.lens[row]))]
    keys = torch.stack([pages.k[page, :, slot].double() for page, slot in slots], dim=1)
    values = torch.stack([pages.v[page, :, :, slot].double() for page, slot in slots], dim=1)
    return keys, values


def scales(batch_shape: tuple[int, ...], kv_heads: int, per_head: bool, device: str = "cpu") -> dict[str, Tensor]:
    """Dequantisation factors as a model with fp8 pages brings them."""
    count = kv_heads if per_head else 1
    return {
        "q_scale": torch.rand(batch_shape, device=device) + 0.5,
        "k_scale": torch.rand(count, device=device) + 0.5,
        "v_scale": torch.rand(count, device=device) + 0.5,
    }


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what was expected; NaN if anything is NaN."""
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30)).item()
