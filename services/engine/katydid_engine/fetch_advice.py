"""Whether blocks that the cache has are worth fetching, or cheaper to compute again. Pure.

A prefix of what was found is fetched: the one with the least time for fetching it and computing the rest. Fetching a
run of one tier takes the longer of what the cache expects (from its own measured speeds) and what reads of that tier
and size took here of late; computing takes tokens over the measured prefill speed. What was measured is believed by
half as much every half minute without a new read, so that a link that was slow once is tried again; and times of a few
milliseconds, which are noise more than speed, count as none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from katydid_cache import Tier, TierRun

__all__ = ["Advice", "FetchAdvice"]

_SMOOTHING = 0.3
_HALF_LIFE_S = 30.0
_NOISE_S = 0.01


@dataclass(frozen=True, slots=True)
class Advice:
    """Fetch the first `blocks` of what was found: expected `fetch_s`, against `compute_s` to compute them; `found_s` is
    what fetching everything would have taken."""

    blocks: int
    fetch_s: float
    compute_s: float
    found_s: float


@dataclass(slots=True)
class _Measured:
    block_s: float
    at: float


class FetchAdvice:
    """Advice for blocks of `block_tokens` tokens, from the reads noted. Times are monotonic seconds of the caller."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._measured: dict[tuple[Tier, int], _Measured] = {}

    def note(self, tier: Tier, blocks: int, elapsed_s: float, now: float) -> None:
        """A read of `blocks` from `tier` took `elapsed_s`."""
        if not blocks:
            return
        key, block_s = (tier, _size(blocks)), elapsed_s / blocks
        known = self._measured.get(key)
        if known is None:
            self._measured[key] = _Measured(block_s, now)
        else:
            known.block_s += _SMOOTHING * (block_s - known.block_s)
            known.at = now

    def advise(self, runs: Sequence[TierRun], prefill_tokens_per_s: float, now: float) -> Advice:
        """How much of `runs` to fetch; all of it while the prefill speed is not known (0)."""
        total = sum(run.blocks for run in runs)
        times = [max(run.eta_s, run.blocks * self._block_s(run, now)) for run in runs]
        costs = [time_s if time_s >= _NOISE_S else 0.0 for time_s in times]
        if prefill_tokens_per_s <= 0:
            return Advice(total, sum(costs), 0.0, sum(costs))
        compute_block_s = self._block_tokens / prefill_tokens_per_s
        best = (0.0, 0, 0.0)
        fetched, fetch_s = 0, 0.0
        for run, cost_s in zip(runs, costs, strict=True):
            fetched += run.blocks
            fetch_s += cost_s
            # Ties go to fetching: it leaves the processor to others.
            best = min(best, (fetch_s - fetched * compute_block_s, -fetched, fetch_s))
        blocks = -best[1]
        return Advice(blocks, best[2], blocks * compute_block_s, sum(costs))

    def _block_s(self, run: TierRun, now: float) -> float:
        known = self._measured.get((run.tier, _size(run.blocks)))
        return 0.0 if known is None else known.block_s * float(0.5 ** ((now - known.at) / _HALF_LIFE_S))


def _size(blocks: int) -> int:
    """Reads of one class take about as long a block: 1, 2, 3-4, 5-8, ... and all above 32, which is a window."""
    return min((blocks - 1).bit_length(), 5)
