"""Moving blocks between a layer's pages and store objects: one object holds one block of every layer and KV head.

    object = [layer][kv_head][K, V][64 * head_dim]

A K run is the page's ``[64, head_dim]`` and a V run its ``[head_dim, 64]``, both exactly as they lie in the page, so
packing copies and never transposes; a layer of an object is one contiguous run and so is one (layer, head). A rank
that holds some of the heads touches only their runs. Bound by the link to host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["kv_pack", "kv_pack_reference", "kv_unpack", "kv_unpack_reference", "object_bytes"]


def object_bytes(*, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, page_size: int = 64) -> int:
    """Size of one block's object with all its KV heads."""
    return num_layers * num_kv_heads * 2 * page_size * head_dim * dtype.itemsize


def kv_pack(
    k_pages: Sequence[Tensor],
    v_pages: Sequence[Tensor],
    page_ids: Tensor,
    objects: Tensor,
    slot_ids: Tensor,
    *,
    object_kv_heads: int,
    first_head: int = 0,
    first_layer: int = 0,
) -> None:
    """Copies pages ``page_ids`` of the given layers into objects ``slot_ids``.

    Args:
        k_pages: per layer ``[pages, kv_heads, 64, head_dim]``; any consecutive layers of the model.
        v_pages: per layer ``[pages, kv_heads, head_dim, 64]``.
        page_ids: int ``[N]``.
        objects: uint8 ``[slots, object_bytes]``, on any device.
        slot_ids: int ``[N]``, rows of ``objects``.
        object_kv_heads: KV heads of the model; an object holds them all.
        first_head: index of this rank's first head among them.
        first_layer: index in the object of ``k_pages[0]``.
    """
    kv_pack_reference(
        k_pages, v_pages, page_ids, objects, slot_ids,
        object_kv_heads=object_kv_heads, first_head=first_head, first_layer=first_layer,
    )  # fmt: skip


def kv_unpack(
    k_pages: Sequence[Tensor],
    v_pages: Sequence[Tensor],
    page_ids: Tensor,
    objects: Tensor,
    slot_ids: Tensor,
    *,
    object_kv_heads: int,
    first_head: int = 0,
    first_layer: int = 0,
) -> None:
    """Copies objects ``slot_ids`` into pages ``page_ids``: the inverse of ``kv_pack``, same arguments."""
    kv_unpack_reference(
        k_pages, v_pages, page_ids, objects, slot_ids,
        object_kv_heads=object_kv_heads, first_head=first_head, first_layer=first_layer,
    )  # fmt: skip


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
) -> None:
    heads = k_pages[0].shape[1]
    runs = _as_runs(objects, k_pages[0], object_kv_heads)
    page_ids = page_ids.long()
    slot_ids = slot_ids.long().to(objects.device)
    for index, (k, v) in enumerate(zip(k_pages, v_pages, strict=True)):
        layer = runs[:, first_layer + index, first_head : first_head + heads]
        layer[slot_ids, :, 0] = _as_bytes(k[page_ids]).to(objects.device)
        layer[slot_ids, :, 1] = _as_bytes(v[page_ids]).to(objects.device)


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
) -> None:
    heads = k_pages[0].shape[1]
    runs = _as_runs(objects, k_pages[0], object_kv_heads)
    page_ids = page_ids.long()
    slot_ids = slot_ids.long().to(objects.device)
    for index, (k, v) in enumerate(zip(k_pages, v_pages, strict=True)):
        layer = runs[slot_ids, first_layer + index, first_head : first_head + heads].to(k.device)
        k[page_ids] = layer[:, :, 0].contiguous().view(k.dtype).view(-1, *k.shape[1:])
        v[page_ids] = layer[:, :, 1].contiguous().view(v.dtype).view(-1, *v.shape[1:])


def _as_bytes(pages: Tensor) -> Tensor:
    """``[N, heads, a, b] -> uint8 [N, heads, run_bytes]``."""
    return pages.contiguous().view(torch.uint8).flatten(2)


def _as_runs(objects: Tensor, page: Tensor, object_kv_heads: int) -> Tensor:
    """``[slots, object_bytes] -> [slots, layers, kv_heads, 2, run_bytes]``."""
    run_bytes = page.shape[2] * page.shape[3] * page.element_size()
    layer_bytes = object_kv_heads * 2 * run_bytes
    if objects.shape[1] % layer_bytes:
        raise ValueError(
            f"objects has rows of {objects.shape[1]} bytes, expected a multiple of {layer_bytes} "
            f"({object_kv_heads} heads, K and V, {run_bytes} bytes each)"
        )
    return objects.view(objects.shape[0], -1, object_kv_heads, 2, run_bytes)
