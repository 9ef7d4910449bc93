"""Who holds which block: the gateway's picture of every rank's prefix cache, within a bound of memory.

The picture is fed by event streams (snapshot, then deltas). What a request is about to put into a cache is predicted
when it is routed, so that its siblings follow it before the first event arrives; a prediction runs out by itself.
Holders are bits of one integer a block, so one walk along a prompt's chain answers for all of them. When the index is
full, blocks leave that no prompt has wanted for longest; what is forgotten costs affinity and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import or_

__all__ = ["Holder", "PrefixIndex"]

PREDICTION_S = 10.0
# What an entry costs with its hash, its integers and its share of the tables; measured by tests/gateway.
_CONFIRMED_BYTES = 240
_PREDICTED_BYTES = 320
# Predictions may take a quarter of the memory, so that a flood of new prompts does not drive out what is known.
_PREDICTED_SHARE = 4


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """One prefix cache: a data-parallel rank of an engine."""

    engine: str
    rank: int


class PrefixIndex:
    """Blocks by holder, confirmed by events or predicted by routing, in at most `capacity_bytes`.

    Times are seconds of one monotonic clock.
    """

    def __init__(self, capacity_bytes: int = 256 * 2**20) -> None:
        self.capacity_bytes = capacity_bytes
        self._holders: list[Holder] = []
        self._bits: dict[Holder, int] = {}
        self._confirmed: OrderedDict[bytes, int] = OrderedDict()
        self._predicted: dict[bytes, int] = {}
        # In the order in which they run out: all last equally long, and a renewed one moves to the end.
        self._until: OrderedDict[tuple[bytes, int], float] = OrderedDict()
        self._counts: dict[Holder, int] = {}

    def __len__(self) -> int:
        return len(self._confirmed)

    @property
    def size_bytes(self) -> int:
        """Memory it takes, as counted against `capacity_bytes`."""
        return len(self._confirmed) * _CONFIRMED_BYTES + len(self._until) * _PREDICTED_BYTES

    def blocks(self, holder: Holder) -> int:
        """Confirmed blocks of a holder."""
        return self._counts.get(holder, 0)

    def stored(self, holder: Holder, hashes: Sequence[bytes]) -> None:
        """These blocks are in the holder's cache."""
        bit = self._bit(holder)
        # From the end, so that a prefix outlives what depends on it.
        for block in reversed(hashes):
            before = self._confirmed.get(block, 0)
            if not before & bit:
                self._confirmed[block] = before | bit
                self._counts[holder] += 1
            if block in self._predicted:
                self._drop_prediction(block, bit)
        self._make_room()

    def removed(self, holder: Holder, hashes: Sequence[bytes]) -> None:
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

    def predict(self, holder: Holder, hashes: Sequence[bytes], now: float) -> None:
        """These blocks will be in the holder's cache soon; believed for `PREDICTION_S` unless events say otherwise."""
        self._expire(now)
        bit, until = self._bit(holder), now + PREDICTION_S
        for block in reversed(hashes):
            if not self._confirmed.get(block, 0) & bit:
                self._predicted[block] = self._predicted.get(block, 0) | bit
                self._until[block, bit] = until
                self._until.move_to_end((block, bit))
        self._make_room()

    def touch(self, chain: Sequence[bytes]) -> None:
        """A prompt wants these blocks: they leave last. In an index that is half empty nothing leaves soon."""
        if 2 * self.size_bytes < self.capacity_bytes:
            return
        for block in reversed(chain):
            if block in self._confirmed:
                self._confirmed.move_to_end(block)

    def depths(self, chain: Sequence[bytes], now: float) -> dict[Holder, int]:
        """Leading blocks of `chain` that each known holder is believed to have."""
        self._expire(now)
        left = (1 << len(self._bits)) - 1
        depth_of_bit: dict[int, int] = {}
        known = map(self._confirmed.get, chain, repeat(0))
        if self._predicted:
            known = map(or_, known, map(self._predicted.get, chain, repeat(0)))
        for place, here in enumerate(known):
            if gone := left & ~here:
                depth_of_bit.update(dict.fromkeys(_bits_of(gone), place))
                left &= here
                if not left:
                    break
        return {holder: depth_of_bit.get(bit, len(chain)) for holder, bit in self._bits.items()}

    def check_integrity(self) -> None:
        """Raises AssertionError when counts and contents disagree, or the bound is exceeded. For tests."""
        for holder, bit in self._bits.items():
            held = sum(1 for bits in self._confirmed.values() if bits & bit)
            assert self._counts[holder] == held, (holder, self._counts[holder], held)
        assert all(self._confirmed.values())
        believed = {(block, bit) for block, bits in self._predicted.items() for bit in _bits_of(bits)}
        assert believed == self._until.keys()
        assert self.size_bytes <= self.capacity_bytes

    def _bit(self, holder: Holder) -> int:
        bit = self._bits.get(holder)
        if bit is None:
            bit = self._bits[holder] = 1 << len(self._bits)
            self._holders.append(holder)
            self._counts[holder] = 0
        return bit

    def _make_room(self) -> None:
        while len(self._until) * _PREDICTED_BYTES > self.capacity_bytes // _PREDICTED_SHARE:
            self._drop_prediction(*next(iter(self._until)))
        while self.size_bytes > self.capacity_bytes:
            _, bits = self._confirmed.popitem(last=False)
            for bit in _bits_of(bits):
                self._counts[self._holders[bit.bit_length() - 1]] -= 1

    def _drop_prediction(self, block: bytes, bit: int) -> None:
        if self._until.pop((block, bit), None) is None:
            return
        left = self._predicted[block] & ~bit
        if left:
            self._predicted[block] = left
        else:
            del self._predicted[block]

    def _expire(self, now: float) -> None:
        while self._until:
            key = next(iter(self._until))
            if self._until[key] > now:
                return
            self._drop_prediction(*key)


def _bits_of(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest
        bits ^= lowest
