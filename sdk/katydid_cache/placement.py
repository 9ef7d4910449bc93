"""Which instance keeps which blocks: rendezvous hashing over runs of a chain, with bounded load. Pure.

A *run* is `RUN_BLOCKS` consecutive blocks of a chain, counted from its beginning, named by the hash of its first block
(`RUN_BLOCKS` stands beside the block hash, because engines name runs too). Every client ranks all instances for a run
by the same hash, so they agree without a master. An instance that joins takes from each of the others an equal share
and nothing else moves; what one leaves behind falls to each run's next in rank.

Why a run and not a block: a prompt is useful up to its first missing block, so a chain scattered block by block over M
instances loses nearly all of itself with any one of them, and its lookup is a call to each. Why not the whole chain:
all conversations that begin with one system prompt would be one instance's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from xxhash import xxh3_64_intdigest

__all__ = ["pick", "rank", "run_starts"]


def rank(run: bytes, instances: Iterable[str]) -> list[str]:
    """The instances by rendezvous hashing, the run's home first; the same list for every order of `instances`."""
    return sorted(instances, key=lambda name: (-xxh3_64_intdigest(run + name.encode()), name))


def pick(
    ranked: Sequence[str], load: Mapping[str, float], *, bound: float = 1.25, more: float = 0.0, slack: float = 0.0
) -> str:
    """The first in rank that would not carry more than `bound` times the mean load once `more` is added.

    `load` counts the same thing for all instances (bytes on the way, say); one not in it carries none. Nobody is over
    the bound with less than `slack`. After Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads"
    (2017), for rendezvous ranks. `ranked` must not be empty.
    """
    ceiling = max(slack, bound * (sum(load.get(name, 0.0) for name in ranked) + more) / len(ranked))
    for name in ranked:
        if load.get(name, 0.0) + more <= ceiling:
            return name
    # One unit may be more than the ceiling alone.
    return min(ranked, key=lambda name: load.get(name, 0.0))


def run_starts(offset: int, count: int, run_blocks: int) -> list[range]:
    """The places in a list of `count` blocks, the first of which is block `offset` of its chain, by run."""
    runs = []
    start = 0
    while start < count:
        end = min(count, start + run_blocks - (offset + start) % run_blocks)
        runs.append(range(start, end))
        start = end
    return runs
