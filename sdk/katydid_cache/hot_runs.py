"""Which runs are asked for so often that two instances should have them, and which are where nobody looks first. Pure.

A run is hot after `threshold` hits that halve every `half_life_s`. What is known here is one client's: another one
learns by its own hits, and what it does not know costs it a miss at worst.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["HotRuns"]

_KEPT = 65_536


class HotRuns:
    """Heat and extra homes of the runs seen last."""

    def __init__(self, *, threshold: float = 8.0, half_life_s: float = 60.0) -> None:
        self._threshold = threshold
        self._half_life_s = half_life_s
        self._heat: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        self._homes: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        self._strays: OrderedDict[bytes, None] = OrderedDict()

    def hit(self, run: bytes, now: float) -> bool:
        """Count a hit at `now` (seconds); whether the run is hot."""
        heat, at = self._heat.pop(run, (0.0, now))
        heat = heat * float(0.5 ** ((now - at) / self._half_life_s)) + 1.0
        self._heat[run] = heat, now
        if len(self._heat) > _KEPT:
            self._heat.popitem(last=False)
        return heat >= self._threshold

    def also_at(self, run: bytes) -> tuple[str, ...]:
        """Instances that have the run beside its home."""
        return self._homes.get(run, ())

    def put_at(self, run: bytes, name: str) -> None:
        """Note that instance `name` has the run."""
        homes = self._homes.pop(run, ())
        self._homes[run] = homes if name in homes else (*homes, name)
        if len(self._homes) > _KEPT:
            self._homes.popitem(last=False)

    def stray(self, run: bytes, name: str) -> bool:
        """Instance `name` has the run, where its home was to have it; whether it is to be copied there.

        It is until `copied`: a copy may fail, or find no place among others.
        """
        if name not in self.also_at(run):
            self.put_at(run, name)
            self._strays[run] = None
            if len(self._strays) > _KEPT:
                self._strays.popitem(last=False)
        return run in self._strays

    def copied(self, run: bytes, name: str) -> None:
        """Instance `name` has a copy of the run now."""
        self.put_at(run, name)
        self._strays.pop(run, None)
