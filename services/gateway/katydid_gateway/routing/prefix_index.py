"""Who holds which block: the gateway's picture of every rank's prefix cache, and of the cache service's tiers.

The picture is fed by event streams (snapshot, then deltas). What a request is about to put into a cache is predicted
when it is routed, so that its siblings follow it before the first event arrives; a prediction runs out by itself.
Holders are bits of one integer a block, so one walk along a prompt's chain answers for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["CacheTier", "Holder", "PrefixIndex", "TierIndex"]

PREDICTION_S = 10.0


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """One prefix cache: a data-parallel rank of an engine."""

    engine: str
    rank: int


class CacheTier(IntEnum):
    """Where the cache service has a block, fastest first."""

    MEMORY = 1
    DISK = 2
    SHARED = 3


class PrefixIndex:
    """Blocks by holder, confirmed by events or predicted by routing. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._bits: dict[Holder, int] = {}
        self._confirmed: dict[bytes, int] = {}
        self._predicted: dict[bytes, int] = {}
        self._until: dict[tuple[bytes, int], float] = {}
        self._expiries: deque[tuple[float, bytes, int]] = deque()
        self._counts: dict[Holder, int] = {}

    def blocks(self, holder: Holder) -> int:
        """Confirmed blocks of a holder."""
        return self._counts.get(holder, 0)

    def stored(self, holder: Holder, hashes: Iterable[bytes]) -> None:
        """These blocks are in the holder's cache."""
        bit = self._bit(holder)
        for block in hashes:
            before = self._confirmed.get(block, 0)
            if not before & bit:
                self._confirmed[block] = before | bit
                self._counts[holder] += 1
            if block in self._predicted:
                self._drop_prediction(block, bit)

    def removed(self, holder: Holder, hashes: Iterable[bytes]) -> None:
        """These blocks have left the holder's cache."""
        bit = self._bit(holder)
        for block in hashes:
            before = self._confirmed.get(block, 0)
            if before & bit:
                self._counts[holder] -= 1
                if before == bit:
                    del self._confirmed[block]
                else:
                    self._confirmed[block] = before & ~bit
            if block in self._predicted:
                self._drop_prediction(block, bit)

    def cleared(self, holder: Holder) -> None:
        """The holder dropped everything, or is gone."""
        bit = self._bit(holder)
        self.removed(holder, [block for block, bits in self._confirmed.items() if bits & bit])
        for block in [block for block, bits in self._predicted.items() if bits & bit]:
            self._drop_prediction(block, bit)

    def predict(self, holder: Holder, hashes: Iterable[bytes], now: float) -> None:
        """These blocks will be in the holder's cache soon; believed for `PREDICTION_S` unless events say otherwise."""
        self._expire(now)
        bit, until = self._bit(holder), now + PREDICTION_S
        for block in hashes:
            if not self._confirmed.get(block, 0) & bit:
                self._predicted[block] = self._predicted.get(block, 0) | bit
                self._until[block, bit] = until
                self._expiries.append((until, block, bit))

    def depths(self, chain: Sequence[bytes], now: float) -> dict[Holder, int]:
        """Leading blocks of `chain` that each known holder is believed to have."""
        self._expire(now)
        left = (1 << len(self._bits)) - 1
        depth_of_bit: dict[int, int] = {}
        confirmed, predicted = self._confirmed.get, self._predicted.get
        for place, block in enumerate(chain):
            here = confirmed(block, 0) | predicted(block, 0)
            if gone := left & ~here:
                depth_of_bit.update(dict.fromkeys(_bits_of(gone), place))
                left &= here
                if not left:
                    break
        return {holder: depth_of_bit.get(bit, len(chain)) for holder, bit in self._bits.items()}

    def check_integrity(self) -> None:
        """Raises AssertionError when counts and contents disagree. For tests."""
        for holder, bit in self._bits.items():
            held = sum(1 for bits in self._confirmed.values() if bits & bit)
            assert self._counts[holder] == held, (holder, self._counts[holder], held)
        assert all(self._confirmed.values())
        believed = {(block, bit) for block, bits in self._predicted.items() for bit in _bits_of(bits)}
        assert believed == self._until.keys()

    def _bit(self, holder: Holder) -> int:
        bit = self._bits.get(holder)
        if bit is None:
            bit = self._bits[holder] = 1 << len(self._bits)
            self._counts[holder] = 0
        return bit

    def _drop_prediction(self, block: bytes, bit: int) -> None:
        if self._until.pop((block, bit), None) is None:
            return
        left = self._predicted[block] & ~bit
        if left:
            self._predicted[block] = left
        else:
            del self._predicted[block]

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            until, block, bit = self._expiries.popleft()
            # A later prediction of the same block keeps it alive.
            if self._until.get((block, bit), now + 1) <= until:
                self._drop_prediction(block, bit)


class TierIndex:
    """Blocks of the cache service by tier."""

    def __init__(self) -> None:
        self._tiers: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._tiers)

    def stored(self, tier: CacheTier, hashes: Iterable[bytes]) -> None:
        for block in hashes:
            self._tiers[block] = self._tiers.get(block, 0) | 1 << tier

    def removed(self, tier: CacheTier, hashes: Iterable[bytes]) -> None:
        for block in hashes:
            left = self._tiers.get(block, 0) & ~(1 << tier)
            if left:
                self._tiers[block] = left
            else:
                self._tiers.pop(block, None)

    def cleared(self) -> None:
        self._tiers.clear()

    def run(self, chain: Sequence[bytes], start: int) -> list[CacheTier]:
        """The fastest tier of each block of `chain` from `start` on, up to the first block that is nowhere."""
        tiers: list[CacheTier] = []
        for place in range(start, len(chain)):
            bits = self._tiers.get(chain[place], 0)
            if not bits:
                break
            tiers.append(next(tier for tier in CacheTier if bits & 1 << tier))
        return tiers


def _bits_of(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest
        bits ^= lowest
