"""Moving blocks between a layer's pages and store objects: one object holds one block of every layer and KV head.

    object = [layer][kv_head][K, V][64 * head_dim]

A K run is the page's ``[64, head_dim]`` and a V run its ``[head_dim, 64]``, both exactly as they lie in the page, so
packing copies and never transposes; a layer of an object is one contiguous run and so is one (layer, head). A rank
that holds some of the heads touches only their runs. Bound by the link to host memory: one kernel reads or writes the
mapped arena itself, with as few CTAs as fill the link, and sums the linear checksum of what passes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from katydid_kernels.kv_pack.kernel import move_runs_kernel
from katydid_kernels.kv_pack.reference import as_runs, kv_pack_reference, kv_unpack_reference

__all__ = ["kv_pack", "kv_unpack", "object_bytes"]

CTAS = 64


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
    checksums: Tensor | None = None,
) -> None:
    """Copies pages ``page_ids`` of the given layers into objects ``slot_ids``.

    With pages on a GPU, `objects` is GPU memory, pinned memory, or a mapping given to `register_memory` once: then this
    is one launch on the current stream and the bytes are in place when it has finished. Other host memory is reached
    through torch, which waits.

    Args:
        k_pages: per layer ``[pages, kv_heads, 64, head_dim]``, contiguous; any consecutive layers of the model.
        v_pages: per layer ``[pages, kv_heads, head_dim, 64]``, contiguous.
        page_ids: int ``[N]``, on the pages' device.
        objects: uint8 ``[slots, object_bytes]``; rows may be further apart than they are long.
        slot_ids: int ``[N]``, rows of ``objects``, on the pages' device.
        object_kv_heads: KV heads of the model; an object holds them all.
        first_head: index of this rank's first head among them.
        first_layer: index in the object of ``k_pages[0]``.
        checksums: int64 ``[N]`` on the pages' device; the part of each object's linear checksum (`checksum.py`) that
            the bytes moved make up is added to it. The sum over all layers and ranks is the object's.

    Raises ValueError where `objects` cannot hold such layers and heads, or lies at an odd address.
    """
    _move(
        True, k_pages, v_pages, page_ids, objects, slot_ids,
        object_kv_heads=object_kv_heads, first_head=first_head, first_layer=first_layer, checksums=checksums,
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
    checksums: Tensor | None = None,
) -> None:
    """Copies objects ``slot_ids`` into pages ``page_ids``: the inverse of ``kv_pack``, same arguments.

    The checksums are of the bytes that arrived in the pages. Whoever has the sums of all layers and ranks compares them
    with the object's; one that differs is a miss, and its pages must not be used.
    """
    _move(
        False, k_pages, v_pages, page_ids, objects, slot_ids,
        object_kv_heads=object_kv_heads, first_head=first_head, first_layer=first_layer, checksums=checksums,
    )  # fmt: skip


def _move(
    pack: bool,
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
    page, blocks = k_pages[0], len(page_ids)
    layers_held = as_runs(objects, page, object_kv_heads).shape[1]
    heads = page.shape[1]
    if not (0 <= first_layer <= layers_held - len(k_pages) and 0 <= first_head <= object_kv_heads - heads):
        raise ValueError(
            f"objects hold {layers_held} layers of {object_kv_heads} heads, got layers {first_layer} to "
            f"{first_layer + len(k_pages)} and heads {first_head} to {first_head + heads}"
        )
    if checksums is not None and (checksums.shape != (blocks,) or checksums.dtype != torch.int64):
        raise ValueError(f"checksums must be int64 [{blocks}], got {checksums.dtype} {list(checksums.shape)}")
    if not _reachable(page, objects):
        move = kv_pack_reference if pack else kv_unpack_reference
        move(
            k_pages, v_pages, page_ids, objects, slot_ids,
            object_kv_heads=object_kv_heads, first_head=first_head, first_layer=first_layer, checksums=checksums,
        )  # fmt: skip
        return
    if objects.data_ptr() % 16 or objects.stride(0) % 16:
        raise ValueError(
            f"objects must lie at multiples of 16 bytes, got address {objects.data_ptr():#x}, {objects.stride(0)} apart"
        )
    if blocks == 0:
        return
    run = page.shape[2] * page.shape[3] * page.element_size() // 4
    items = blocks * len(k_pages) * heads * 2
    bases = _bases(tuple(t.data_ptr() for pair in zip(k_pages, v_pages, strict=True) for t in pair), page.device)
    move_runs_kernel[(min(items, CTAS),)](
        bases, page_ids, objects.view(torch.int32), slot_ids, checksums, items, len(k_pages), heads,
        objects.stride(0) // 4, object_kv_heads, first_head, first_layer,
        RUN=run, BLOCK=min(4096, triton.next_power_of_2(run)), PACK=pack, num_warps=8,
    )  # fmt: skip


def _reachable(page: Tensor, objects: Tensor) -> bool:
    """Whether a kernel on the pages' device can touch the objects."""
    return page.is_cuda and (objects.is_cuda or objects.is_pinned())


@functools.lru_cache(maxsize=1024)
def _bases(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Where the layers' pages lie, on the device: made once for a cache and a range of its layers."""
    return torch.tensor(addresses, dtype=torch.int64).to(device)
