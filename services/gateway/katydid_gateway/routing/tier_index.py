"""Which blocks the cache service has, by instance and tier: what an engine could fetch instead of computing it.

An engine reads its own host's instance fast; what another instance holds is pulled over the network first, and so
costs what the shared store costs. Places are bits of one integer a block, least recently wanted blocks leave first when
the index is full.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["CacheTier", "TierIndex", "TierRun"]

# A hash, its entry in the ordered dict and its integer; tests/gateway/test_prefix_index.py measures it.
_ENTRY_BYTES = 240
_TIERS = 3


class CacheTier(IntEnum):
    """Where the cache service has a block, fastest first."""

    MEMORY = 1
    DISK = 2
    SHARED = 3


@dataclass(frozen=True, slots=True)
class TierRun:
    """So many consecutive blocks of a prompt in one tier."""

    tier: CacheTier
    blocks: int


class TierIndex:
    """Blocks of all instances, within `capacity_bytes` of memory. Instances are named by their addresses."""

    def __init__(self, capacity_bytes: int = 64 * 2**20) -> None:
        self._most = capacity_bytes // _ENTRY_BYTES
        self._places: OrderedDict[bytes, int] = OrderedDict()
        self._instances: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def size_bytes(self) -> int:
        return len(self._places) * _ENTRY_BYTES

    def stored(self, instance: str, tier: CacheTier, hashes: Sequence[bytes]) -> None:
        """These blocks entered a tier of an instance."""
        bit = self._bit(instance, tier)
        # From the end, so that a prefix outlives what depends on it.
        for block in reversed(hashes):
            self._places[block] = self._places.get(block, 0) | bit
        while len(self._places) > self._most:
            self._places.popitem(last=False)

    def removed(self, instance: str, tier: CacheTier, hashes: Iterable[bytes]) -> None:
        """These blocks left a tier of an instance."""
        bit = self._bit(instance, tier)
        for block in hashes:
            self._drop(block, bit)

    def cleared(self, instance: str) -> None:
        """The instance is away, or tells everything anew."""
        bits = sum(self._bit(instance, tier) for tier in CacheTier)
        for block in [block for block, places in self._places.items() if places & bits]:
            self._drop(block, bits)

    def touch(self, chain: Sequence[bytes]) -> None:
        """A prompt wants these blocks: they leave last. In an index that is half empty nothing leaves soon."""
        if 2 * len(self._places) < self._most:
            return
        for block in reversed(chain):
            if block in self._places:
                self._places.move_to_end(block)

    def runs(self, chain: Sequence[bytes], start: int, near: str = "") -> list[TierRun]:
        """Tiers of the blocks of `chain` from `start` on, up to the first block that is nowhere.

        `near` is the instance on the engine's own host: blocks that others alone hold count as SHARED. With "" or an
        instance that is not known, every instance is as good as the other.
        """
        tier_of: dict[int, CacheTier] = {}
        runs: list[TierRun] = []
        places, last, count = self._places.get, None, 0
        for place in range(start, len(chain)):
            bits = places(chain[place], 0)
            if not bits:
                break
            tier = tier_of.get(bits)
            if tier is None:
                tier = tier_of[bits] = self._fastest(bits, near)
            if tier is not last:
                if last is not None:
                    runs.append(TierRun(last, count))
                last, count = tier, 0
            count += 1
        if last is not None:
            runs.append(TierRun(last, count))
        return runs

    def _fastest(self, bits: int, near: str) -> CacheTier:
        if near in self._instances:
            own = bits >> _TIERS * self._instances[near] & (1 << _TIERS) - 1
            return next((tier for tier in CacheTier if own & 1 << tier - 1), CacheTier.SHARED)
        for tier in CacheTier:
            if any(bits & self._bit(instance, tier) for instance in self._instances):
                return tier
        raise AssertionError("a block without a place is not kept")

    def _bit(self, instance: str, tier: CacheTier) -> int:
        number = self._instances.setdefault(instance, len(self._instances))
        return 1 << _TIERS * number + tier - 1

    def _drop(self, block: bytes, bits: int) -> None:
        left = self._places.get(block, 0) & ~bits
        if left:
            self._places[block] = left
        else:
            self._places.pop(block, None)
