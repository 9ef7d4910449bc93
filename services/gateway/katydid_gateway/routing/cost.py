"""Predicted time to first token: queue + fetch + prefill + decode pressure, in seconds.

    queue    = tokens to be computed before / prefill speed, and how long first tokens that the rank owes are late
    fetch    = sum over tiers of bytes / measured speed of the tier
    prefill  = tokens that are nowhere / prefill speed
    pressure = what a nearly full rank makes a request wait for pages: 50 ms * (k - 0.8) / (1 - k), where the share k of
               its pages that running requests hold is above 0.8

Fetching is priced for the blocks behind the ones the rank holds, and for as many of them as it is faster for than
computing: the engine decides alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from katydid_runtime.block_hash import BLOCK_TOKENS

from katydid_gateway.routing.load import EngineState, RankState
from katydid_gateway.routing.tier_index import CacheTier, TierRun

__all__ = ["DEFAULT_PREFILL_SPEED", "Prediction", "TierSpeeds", "predict"]

# Until an engine has measured its own speed. Low, so that an unmeasured engine is not flooded.
DEFAULT_PREFILL_SPEED = 4000.0
# A measurement's weight in the moving average.
_SMOOTHING = 0.2
_PRESSURE_S = 0.05
_FULL, _FULLEST = 0.8, 0.99


@dataclass(slots=True)
class TierSpeeds:
    """Bytes per second from each tier of the cache service, learned from finished fetches."""

    bytes_per_s: dict[CacheTier, float] = field(
        default_factory=lambda: {CacheTier.MEMORY: 4e9, CacheTier.DISK: 1.5e9, CacheTier.SHARED: 3e8}
    )

    def measured(self, tier: CacheTier, size_bytes: int, seconds: float) -> None:
        if size_bytes > 0 and seconds > 0:
            speed = size_bytes / seconds
            self.bytes_per_s[tier] += _SMOOTHING * (speed - self.bytes_per_s[tier])


@dataclass(frozen=True, slots=True)
class Prediction:
    """The terms, and the block counts they rest on; `late_s` is a part of `queue_s`."""

    queue_s: float
    fetch_s: float
    prefill_s: float
    device_blocks: int
    cached_blocks: int
    uncached_tokens: int
    pressure_s: float = 0.0
    late_s: float = 0.0

    @property
    def expected_s(self) -> float:
        """The time to first token by work alone: of which lateness is told."""
        return self.ttft_s - self.late_s

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.fetch_s + self.prefill_s + self.pressure_s


def predict(
    engine: EngineState,
    rank: RankState,
    prompt_tokens: int,
    device_blocks: int,
    runs: Sequence[TierRun],
    speeds: TierSpeeds,
    late_s: float = 0.0,
) -> Prediction:
    """Terms for a prompt of which the rank, `late_s` behind, holds `device_blocks` blocks and the service the next ones
    in `runs`."""
    speed = rank.report.prefill_speed or DEFAULT_PREFILL_SPEED
    fetch_s, fetched = _fetch(engine, runs, speed, speeds) if engine.kv_cache_attached else (0.0, 0)
    # The last token is always computed: its logits are what the first sample needs.
    uncached = max(1, prompt_tokens - (device_blocks + fetched) * BLOCK_TOKENS)
    return Prediction(
        queue_s=rank.queued_tokens / speed + late_s,
        fetch_s=fetch_s,
        prefill_s=uncached / speed,
        device_blocks=device_blocks,
        cached_blocks=fetched,
        uncached_tokens=uncached,
        pressure_s=_pressure_s(rank),
        late_s=late_s,
    )


def _fetch(engine: EngineState, runs: Sequence[TierRun], speed: float, speeds: TierSpeeds) -> tuple[float, int]:
    """Seconds and blocks of the prefix of `runs` that is worth most."""
    best = (0.0, 0)
    saved = most_saved = seconds = 0.0
    blocks = 0
    for run in runs:
        own_s = run.blocks * engine.block_bytes / speeds.bytes_per_s[run.tier]
        seconds, blocks = seconds + own_s, blocks + run.blocks
        saved += run.blocks * BLOCK_TOKENS / speed - own_s
        if saved > most_saved:
            most_saved, best = saved, (seconds, blocks)
    return best


def _pressure_s(rank: RankState) -> float:
    if not rank.report.total_pages:
        return 0.0
    used = min(_FULLEST, 1 - rank.report.free_pages / rank.report.total_pages)
    return _PRESSURE_S * max(0.0, used - _FULL) / (1 - used)
