"""How much work comes in under each prefix, and so at which boundary prompts should be kept together.

Grouped by a short prefix, everybody who shares a system prompt lands on one engine; grouped by all of it, nobody shares
anything. The right boundary is the shortest prefix whose work one engine can do: the prompts under it meet in one
cache, and gateways that share nothing agree on it. A prompt that is too hot even as a whole gets several homes.
Boundaries lie at 1, 2, 4, ... blocks and at the end; work counts half as much every `HALF_LIFE_S`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Boundary", "PrefixHeat"]

HALF_LIFE_S = 60.0
# Work that came steadily at one token a second stands at so many tokens.
_STEADY_S = HALF_LIFE_S / math.log(2)
# What a boundary's entry costs: hash, pair of floats, place in the ordered dict.
_ENTRY_BYTES = 340


@dataclass(frozen=True, slots=True)
class Boundary:
    """The block that names a group of prompts, how many blocks it covers, and how many homes its work needs."""

    block: bytes
    depth: int
    homes: int


class PrefixHeat:
    """Decayed work by boundary, in tokens, least recently seen out first, within `capacity_bytes`."""

    def __init__(self, capacity_bytes: int = 16 * 2**20) -> None:
        self._most = max(1, capacity_bytes // _ENTRY_BYTES)
        self._work: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        return len(self._work) * _ENTRY_BYTES

    def add(self, chain: Sequence[bytes], tokens: int, now: float) -> None:
        """A prompt was sent of which so many tokens have to be computed."""
        for depth in _boundaries(len(chain)):
            block = chain[depth - 1]
            self._work[block] = (self._tokens(block, now) + tokens, now)
            self._work.move_to_end(block)
        while len(self._work) > self._most:
            self._work.popitem(last=False)

    def tokens_per_s(self, block: bytes, now: float) -> float:
        """Recent work under a boundary."""
        return self._tokens(block, now) / _STEADY_S

    def boundary(self, chain: Sequence[bytes], engine_tokens_per_s: float, now: float) -> Boundary:
        """Where prompts like this one are kept together; `chain` has at least one block."""
        for depth in _boundaries(len(chain)):
            block = chain[depth - 1]
            speed = self.tokens_per_s(block, now)
            if speed <= engine_tokens_per_s:
                return Boundary(block, depth, 1)
        return Boundary(block, len(chain), math.ceil(speed / engine_tokens_per_s))

    def _tokens(self, block: bytes, now: float) -> float:
        tokens, since = self._work.get(block, (0.0, now))
        return tokens * math.exp2((since - now) / HALF_LIFE_S)


def _boundaries(blocks: int) -> list[int]:
    """1, 2, 4, ... below `blocks`, and `blocks`; none of 0."""
    if not blocks:
        return []
    return [*(1 << power for power in range(blocks.bit_length()) if 1 << power < blocks), blocks]
