"""The pages of one model on one rank: a K and a V tensor per layer, addressed by page number."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from katydid_engine.forward_batch import PAGE_SIZE

__all__ = ["KvCache"]


@dataclass(frozen=True, slots=True)
class KvCache:
    """Paged keys and values of every layer.

    Attributes:
        k_pages: per layer ``[num_pages, kv_heads, 64, head_dim]``.
        v_pages: per layer ``[num_pages, kv_heads, head_dim, 64]`` (token-contiguous: fp8 tensor cores take only
            K-major operands). A model with an MTP layer keeps that layer's pages last.
        coming: by layer, the event after which blocks that are being unpacked can be read; for the pass under way.
    """

    k_pages: tuple[Tensor, ...]
    v_pages: tuple[Tensor, ...]
    coming: dict[int, torch.cuda.Event] = field(default_factory=dict)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V pages of a layer, for the current stream to use when what is coming to them has come."""
        event = self.coming.pop(index, None)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        return self.k_pages[index], self.v_pages[index]

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KvCache:
        """Zeroed pages: the unused tail of a page is read under a mask and must be finite."""
        k_shape = (num_pages, num_kv_heads, PAGE_SIZE, head_dim)
        v_shape = (num_pages, num_kv_heads, head_dim, PAGE_SIZE)
        return cls(
            k_pages=tuple(torch.zeros(k_shape, dtype=dtype, device=device) for _ in range(num_layers)),
            v_pages=tuple(torch.zeros(v_shape, dtype=dtype, device=device) for _ in range(num_layers)),
        )

    @property
    def num_layers(self) -> int:
        return len(self.k_pages)

    @property
    def num_pages(self) -> int:
        return self.k_pages[0].shape[0]

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page number over all layers, K and V: the size of its store object on this rank."""
        k = self.k_pages[0]
        return 2 * self.num_layers * k[0].numel() * k.element_size()
