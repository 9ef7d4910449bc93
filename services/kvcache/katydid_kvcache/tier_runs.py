"""In which tiers blocks are, and how long it takes to have them in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

from katydid_cache.records import Tier, TierRun

from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.read_speeds import ReadSpeeds

__all__ = ["eta_s", "tier_of", "tier_runs"]


def tier_of(block: Block) -> Tier:
    """The highest tier a block is in."""
    if block.memory is not None:
        return Tier.MEMORY
    return Tier.SHARED if block.disk is None else Tier.DISK


def tier_runs(speeds: ReadSpeeds, namespace: Namespace, blocks: Sequence[Block]) -> tuple[TierRun, ...]:
    """Blocks that follow each other, by tier, with the time until all up to the end of each run are in memory."""
    runs: list[TierRun] = []
    below: Counter[Tier] = Counter()
    first = 0
    # Most blocks of most lookups are in memory, and there may be thousands of them.
    for away, group in groupby([block.memory is None for block in blocks]):
        part = blocks[first : first + len([*group])]
        first += len(part)
        if not away:
            runs.append(TierRun(Tier.MEMORY, len(part), 0.0))
            continue
        for tier, same in groupby([tier_of(block) for block in part]):
            below[tier] += (count := len([*same]))
            runs.append(TierRun(tier, count, eta_s(speeds, namespace, below)))
    return tuple(runs)


def eta_s(speeds: ReadSpeeds, namespace: Namespace, below: Mapping[Tier, int]) -> float:
    """Expected time to have so many blocks of each tier in memory."""
    return sum(speeds.seconds(tier, count, namespace.slot_bytes) for tier, count in below.items())
