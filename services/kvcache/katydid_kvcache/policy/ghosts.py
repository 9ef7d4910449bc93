"""What a tier would have found with other sizes and other admission: caches of keys alone, fed with every lookup.

Two reuse stacks are kept, one of all keys and one of keys that came back while the first still remembered them: the
contents of LRU caches that admit everything, and at the second touch. Their hits at the tier's own size say which of
the two rules serves better now; their hits at half, twice and four times the size are points of the hit-rate curve.
Full key caches are needed for that: caches of sampled requests were wrong by 15 to 65 % on public traces.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from katydid_kvcache.policy.reuse_stack import ReuseStack

__all__ = ["Ghosts", "HitRate"]

_FACTORS = (0.5, 1, 2, 4)
_OWN = _FACTORS.index(1)
_WINDOW_LOOKUPS = 200
_STEP_KEYS = 32


@dataclass(frozen=True, slots=True)
class HitRate:
    """Share of the blocks looked up that a tier of `capacity_bytes` would find; averages over about 200 lookups."""

    capacity_bytes: int
    admit_all: float
    second_touch: float


class Ghosts:
    """The ghosts of a tier of `capacity_bytes`. A key is remembered until four times as many bytes were used since."""

    def __init__(self, capacity_bytes: int) -> None:
        sizes = [int(capacity_bytes * factor) for factor in _FACTORS]
        self._all = ReuseStack(sizes)
        self._returned = ReuseStack(sizes)
        self._hits = {id(stack): [0.0] * len(sizes) for stack in (self._all, self._returned)}
        self._asked = 0.0

    def observe(self, chain: Sequence[Hashable], weight: int) -> None:
        """A chain of keys, each of `weight` bytes, was looked up: count what would have been found, then use them."""
        for _ in self.observe_steps(chain, weight):
            pass

    def observe_steps(self, chain: Sequence[Hashable], weight: int) -> Iterator[None]:
        """`observe` in steps of some 50 microseconds, so that other work can go on between them."""
        fade = 1 - 1 / _WINDOW_LOOKUPS
        self._asked = self._asked * fade + len(chain)
        for stack in (self._all, self._returned):
            found = _Prefixes(stack)
            for start in range(0, len(chain), _STEP_KEYS):
                yield
                found.go_on(chain[start : start + _STEP_KEYS])
            hits = self._hits[id(stack)]
            hits[:] = [before * fade + blocks for before, blocks in zip(hits, found.blocks, strict=True)]
        # The last key is used first, so that it is the first to be forgotten.
        forgotten = len(self._all.sizes)
        for number, key in enumerate(reversed(chain)):
            if number % _STEP_KEYS == 0:
                yield
            if self._all.depth(key) < forgotten or self._returned.depth(key) < forgotten:
                self._returned.touch(key, weight)
            self._all.touch(key, weight)

    def returned(self, key: Hashable) -> bool:
        """Whether the key was looked up twice within the ghosts' memory."""
        return self._returned.depth(key) < len(self._returned.sizes)

    @property
    def second_touch_is_better(self) -> bool:
        """Whether admission at the second touch would have found more at the tier's own size lately."""
        return self._hits[id(self._returned)][_OWN] > self._hits[id(self._all)][_OWN]

    def hit_rates(self) -> list[HitRate]:
        """Points of the hit-rate curve, by size."""
        asked = self._asked or 1.0
        every, second = self._hits[id(self._all)], self._hits[id(self._returned)]
        return [
            HitRate(size, every[number] / asked, second[number] / asked) for number, size in enumerate(self._all.sizes)
        ]

    def __len__(self) -> int:
        """Keys remembered."""
        return len(self._all) + len(self._returned)


class _Prefixes:
    """For each size of a stack, the blocks of a chain before the first one that it would not hold."""

    def __init__(self, stack: ReuseStack) -> None:
        self._stack = stack
        self._ended: list[int] = []  # for the sizes, smallest first, that did not hold all so far
        self._keys = 0

    def go_on(self, keys: Sequence[Hashable]) -> None:
        """The next keys of the chain."""
        depth_of, ended, sizes = self._stack.depth, self._ended, len(self._stack.sizes)
        for number, key in enumerate(keys, self._keys):
            if len(ended) == sizes:
                break
            if (depth := depth_of(key)) > len(ended):
                ended += [number] * (depth - len(ended))
        self._keys += len(keys)

    @property
    def blocks(self) -> list[int]:
        return self._ended + [self._keys] * (len(self._stack.sizes) - len(self._ended))
