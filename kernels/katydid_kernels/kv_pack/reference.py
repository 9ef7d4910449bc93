"""kv_pack and kv_unpack without a kernel: between memory that no GPU reaches, or from a GPU to such memory in torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from katydid_kernels.kv_pack.checksum import multipliers
from katydid_kernels.kv_pack.host_move import HostMove

__all__ = ["as_runs", "kv_pack_reference", "kv_unpack_reference"]


def kv_pack_reference(
    k_pages: Sequence[Tensor],
    v_pages: Sequence[Tensor],
    page_ids: Tensor,
    objects: Tensor,
    slot_ids: Tensor,
    *,
    object_kv_heads: int,
    first_head: int,
    first_layer: int,
    checksums: Tensor | None,
) -> None:
    """`kv_pack` in torch, of its arguments; on a GPU it waits for the copy."""
    heads = k_pages[0].shape[1]
    runs = as_runs(objects, k_pages[0], object_kv_heads)
    if not (k_pages[0].is_cuda or objects.is_cuda):
        move = HostMove(runs, k_pages, v_pages, first_layer, first_head)
        move.pack(page_ids.tolist(), slot_ids.tolist(), checksums)
        return
    page_ids = page_ids.long()
    slot_ids = slot_ids.long().to(objects.device)
    for index, (k, v) in enumerate(zip(k_pages, v_pages, strict=True)):
        layer = runs[:, first_layer + index, first_head : first_head + heads]
        moved = torch.stack((_as_bytes(k[page_ids]), _as_bytes(v[page_ids])), dim=2).to(objects.device)
        layer[slot_ids] = moved
        _add_checksums(checksums, moved, first_layer + index, first_head, object_kv_heads)


def kv_unpack_reference(
    k_pages: Sequence[Tensor],
    v_pages: Sequence[Tensor],
    page_ids: Tensor,
    objects: Tensor,
    slot_ids: Tensor,
    *,
    object_kv_heads: int,
    first_head: int,
    first_layer: int,
    checksums: Tensor | None,
) -> None:
    """`kv_unpack` in torch, of its arguments; on a GPU it waits for the copy."""
    heads = k_pages[0].shape[1]
    runs = as_runs(objects, k_pages[0], object_kv_heads)
    if not (k_pages[0].is_cuda or objects.is_cuda):
        move = HostMove(runs, k_pages, v_pages, first_layer, first_head)
        move.unpack(page_ids.tolist(), slot_ids.tolist(), checksums)
        return
    page_ids = page_ids.long()
    slot_ids = slot_ids.long().to(objects.device)
    for index, (k, v) in enumerate(zip(k_pages, v_pages, strict=True)):
        moved = runs[slot_ids, first_layer + index, first_head : first_head + heads]
        layer = moved.to(k.device)
        k[page_ids] = layer[:, :, 0].contiguous().view(k.dtype).view(-1, *k.shape[1:])
        v[page_ids] = layer[:, :, 1].contiguous().view(v.dtype).view(-1, *v.shape[1:])
        _add_checksums(checksums, moved, first_layer + index, first_head, object_kv_heads)


def _add_checksums(checksums: Tensor | None, moved: Tensor, layer: int, first_head: int, object_kv_heads: int) -> None:
    """Adds one layer's part: ``moved`` is uint8 ``[N, heads, 2, run_bytes]``."""
    if checksums is None:
        return
    _, heads, _, run_bytes = moved.shape
    first_word = (layer * object_kv_heads + first_head) * 2 * run_bytes // 4
    factors = _factors(first_word, heads * 2 * run_bytes // 4)
    words = moved.contiguous().view(torch.int32).flatten(1).long() & 0xFFFFFFFF
    checksums += (words * factors.to(words.device)).sum(1).to(checksums.device)


@functools.lru_cache(maxsize=256)
def _factors(first_word: int, count: int) -> Tensor:
    """One layer's, kept: to make them takes several times what the sum does."""
    return torch.from_numpy(multipliers(first_word, count).view("int64"))


def _as_bytes(pages: Tensor) -> Tensor:
    """``[N, heads, a, b] -> uint8 [N, heads, run_bytes]``."""
    return pages.contiguous().view(torch.uint8).flatten(2)


def as_runs(objects: Tensor, page: Tensor, object_kv_heads: int) -> Tensor:
    """``[slots, object_bytes] -> [slots, layers, kv_heads, 2, run_bytes]``."""
    run_bytes = page.shape[2] * page.shape[3] * page.element_size()
    layer_bytes = object_kv_heads * 2 * run_bytes
    if objects.shape[1] % layer_bytes:
        raise ValueError(
            f"objects has rows of {objects.shape[1]} bytes, expected a multiple of {layer_bytes} "
            f"({object_kv_heads} heads, K and V, {run_bytes} bytes each)"
        )
    return objects.view(objects.shape[0], -1, object_kv_heads, 2, run_bytes)
