"""Blocks between pages and store objects that are both in host memory: numpy copies, summed while in the cache.

A block goes through a scratch object of the rank's own layers and heads, and what is summed is that: the bytes that
went into the slot, or from the slot into the pages, whatever others do to the slot meanwhile. Torch's indexed copies
take ten times as long for a few blocks of many small runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from katydid_kernels.kv_pack.checksum import multipliers

__all__ = ["HostMove"]

_PIECE_WORDS = 128 * 1024


class HostMove:
    """Moves blocks of ``runs`` uint8 ``[slots, layers, kv_heads, 2, run_bytes]`` and a rank's pages, all on the CPU.

    The pages are those of ``kv_pack``; the rank's first layer and head are given as there.
    """

    def __init__(
        self, runs: Tensor, k_pages: Sequence[Tensor], v_pages: Sequence[Tensor], first_layer: int, first_head: int
    ) -> None:
        layers, heads = len(k_pages), k_pages[0].shape[1]
        kv_heads, run_bytes = runs.shape[2], runs.shape[4]
        own = runs[:, first_layer : first_layer + layers, first_head : first_head + heads]
        self._slots = own.numpy()
        self._pages = [
            (_as_bytes(k, run_bytes), _as_bytes(v, run_bytes)) for k, v in zip(k_pages, v_pages, strict=True)
        ]
        self._scratch = np.empty((layers, heads, 2, run_bytes), dtype=np.uint8)
        self._factors = functools.partial(_factors, layers, heads, run_bytes // 4, first_layer, first_head, kv_heads)

    def pack(self, pages: Sequence[int], slots: Sequence[int], checksums: Tensor | None) -> None:
        """Copies pages into slots; adds to ``checksums`` int64 ``[N]`` unless it is None."""
        sums = []
        for page, slot in zip(pages, slots, strict=True):
            for layer, (k, v) in enumerate(self._pages):
                self._scratch[layer, :, 0] = k[page]
                self._scratch[layer, :, 1] = v[page]
            self._slots[slot] = self._scratch
            sums.append(self._sum() if checksums is not None else 0)
        _add(checksums, sums)

    def unpack(self, pages: Sequence[int], slots: Sequence[int], checksums: Tensor | None) -> None:
        """Copies slots into pages; adds to ``checksums`` int64 ``[N]`` unless it is None."""
        sums = []
        for page, slot in zip(pages, slots, strict=True):
            self._scratch[:] = self._slots[slot]
            for layer, (k, v) in enumerate(self._pages):
                k[page] = self._scratch[layer, :, 0]
                v[page] = self._scratch[layer, :, 1]
            sums.append(self._sum() if checksums is not None else 0)
        _add(checksums, sums)

    def _sum(self) -> int:
        """What the scratch object contributes to its object's checksum, as a signed 64-bit number."""
        words, factors, total = self._scratch.reshape(-1).view("<u4"), self._factors(), 0
        for first in range(0, len(words), _PIECE_WORDS):
            piece = slice(first, first + _PIECE_WORDS)
            total += int(np.dot(words[piece], factors[piece]))
        return (total + 2**63) % 2**64 - 2**63


def _as_bytes(pages: Tensor, run_bytes: int) -> NDArray[np.uint8]:
    """``[pages, heads, a, b] -> uint8 [pages, heads, run_bytes]``, the same memory."""
    bytes_: NDArray[np.uint8] = pages.view(torch.uint8).view(pages.shape[0], pages.shape[1], run_bytes).numpy()
    return bytes_


def _add(checksums: Tensor | None, sums: Sequence[int]) -> None:
    if checksums is not None:
        checksums += torch.tensor(sums, dtype=torch.int64, device=checksums.device)


@functools.lru_cache(maxsize=8)
def _factors(
    layers: int, heads: int, run_words: int, first_layer: int, first_head: int, kv_heads: int
) -> NDArray[np.uint64]:
    """The multipliers of a rank's words, kept: to make them takes several times what the sum does."""
    firsts = [((first_layer + layer) * kv_heads + first_head) * 2 * run_words for layer in range(layers)]
    return np.concatenate([multipliers(first, heads * 2 * run_words) for first in firsts])
