"""The byte n-gram that hy3-tiny is held against: interpolated with Witten-Bell weights, or with absolute discounting.

Both are computed exactly from counts of the whole training text; the figure that counts is the lower of the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Smoothing = Literal["witten-bell", "absolute-discounting"]


@dataclass(frozen=True)
class _Order:
    """Counts of one order: n-grams packed big-endian into int64; per context its count and distinct next bytes."""

    grams: NDArray[np.int64]
    counts: NDArray[np.int64]
    contexts: NDArray[np.int64]
    context_counts: NDArray[np.int64]
    distinct: NDArray[np.int64]
    discount: float


def _pack(data: NDArray[np.uint8], order: int) -> NDArray[np.int64]:
    packed = np.zeros(len(data) - order + 1, dtype=np.int64)
    for i in range(order):
        packed = (packed << 8) | data[i : i + len(packed)]
    return packed


def _collapse(keys: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sums the counts of equal neighbours of a sorted array."""
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    return keys[starts], np.add.reduceat(counts, starts)


class ByteNgram:
    """An interpolated byte model of the given order (5: four bytes of context)."""

    def __init__(self, text: bytes, order: int = 5) -> None:
        if len(text) < order:
            raise ValueError(f"text has {len(text)} bytes, at least {order} are needed for a {order}-gram model")
        data = np.frombuffer(text, dtype=np.uint8)
        keys = _pack(data, order)
        keys.sort()
        grams, counts = _collapse(keys, np.ones(len(keys), dtype=np.int64))
        self.orders: list[_Order] = []
        for _ in range(order):
            contexts, context_counts = _collapse(grams >> 8, counts)
            _, distinct = _collapse(grams >> 8, np.ones(len(grams), dtype=np.int64))
            once, twice = int((counts == 1).sum()), int((counts == 2).sum())
            discount = once / (once + 2 * twice) if once else 0.5
            self.orders.insert(0, _Order(grams, counts, contexts, context_counts, distinct, discount))
            grams, counts = contexts, context_counts

    def bits_per_byte(self, text: bytes, smoothing: Smoothing = "witten-bell") -> float:
        """Mean code length of `text` in bits per byte; the first order - 1 bytes use the contexts that they have."""
        data = np.frombuffer(text, dtype=np.uint8)
        probability = np.full(len(data), 1 / 256)
        for n, order in enumerate(self.orders, start=1):
            if len(data) < n:
                break
            keys = _pack(data, n)
            seen = _lookup(order.grams, order.counts, keys)
            context = _lookup(order.contexts, order.context_counts, keys >> 8)
            distinct = _lookup(order.contexts, order.distinct, keys >> 8)
            lower = probability[n - 1 :]
            known = context > 0
            if smoothing == "witten-bell":
                mixed = (seen + distinct * lower) / np.maximum(context + distinct, 1)
            else:
                mixed = (np.maximum(seen - order.discount, 0) + order.discount * distinct * lower) / np.maximum(
                    context, 1
                )
            probability[n - 1 :] = np.where(known, mixed, lower)
        return float(-np.log2(probability).mean())


def _lookup(keys: NDArray[np.int64], values: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.int64]:
    """values[i] where keys[i] == wanted, else zero; `keys` is sorted."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0)
