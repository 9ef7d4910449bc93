"""How fast blocks come out of a tier, measured: exponential averages by tier and size. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from katydid_cache.records import Tier

__all__ = ["ReadSpeeds"]

_WEIGHT = 0.1
_ASSUMED = {Tier.MEMORY: 10e9, Tier.DISK: 1e9, Tier.SHARED: 0.2e9}


class ReadSpeeds:
    """Bytes per second of reads, by tier and the power of two above their size; assumed until one is measured."""

    def __init__(self) -> None:
        self._speeds: dict[tuple[Tier, int], float] = {}

    def note(self, tier: Tier, size: int, elapsed_s: float, *, at_once: int = 1) -> None:
        """A read of `size` bytes took `elapsed_s`; with `at_once` of them under way the tier is that much faster."""
        if size <= 0:
            return
        key, speed = (tier, _above(size)), at_once * size / max(elapsed_s, 1e-6)
        known = self._speeds.get(key)
        self._speeds[key] = speed if known is None else known + _WEIGHT * (speed - known)

    def seconds(self, tier: Tier, reads: int, size: int) -> float:
        """Expected time of so many reads of `size` bytes each, from the speed of the nearest size measured."""
        if not reads:
            return 0.0
        wanted = _above(size)
        near = [key for key in self._speeds if key[0] is tier]
        key = min(near, key=lambda key: abs(key[1].bit_length() - wanted.bit_length()), default=None)
        return reads * size / (_ASSUMED[tier] if key is None else self._speeds[key])

    def __iter__(self) -> Iterator[tuple[Tier, int, float]]:
        """Tier, size and bytes per second of all that was measured."""
        return iter(sorted((tier, size, speed) for (tier, size), speed in self._speeds.items()))


def _above(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
