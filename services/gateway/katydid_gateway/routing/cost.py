"""Predicted time to first token: queue + fetch + prefill, in seconds.

    queue   = tokens to be computed before / prefill speed
    fetch   = sum over tiers of bytes / measured speed of the tier
    prefill = tokens that are nowhere / prefill speed

Fetching is priced only for blocks behind the ones the rank holds, and not where computing them is faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from katydid_runtime.block_hash import BLOCK_TOKENS

from katydid_gateway.routing.load import EngineState, RankState
from katydid_gateway.routing.prefix_index import CacheTier

__all__ = ["Prediction", "TierSpeeds", "predict"]

# Until an engine has measured its own speed. Low, so that an unmeasured engine is not flooded.
DEFAULT_PREFILL_SPEED = 4000.0
# A measurement's weight in the moving average.
_SMOOTHING = 0.2


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
    """The terms, and the block counts they rest on."""

    queue_s: float
    fetch_s: float
    prefill_s: float
    device_blocks: int
    cached_blocks: int
    uncached_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.fetch_s + self.prefill_s


def predict(
    engine: EngineState,
    rank: RankState,
    prompt_tokens: int,
    device_blocks: int,
    tiers: Sequence[CacheTier],
    speeds: TierSpeeds,
) -> Prediction:
    """Terms for a prompt of which the rank holds `device_blocks` blocks and the service the next `len(tiers)`."""
    speed = rank.report.prefill_speed or DEFAULT_PREFILL_SPEED
    fetch_s, fetched = 0.0, 0
    if tiers and engine.kv_cache_attached:
        sizes = Counter(tiers)
        seconds = sum(count * engine.block_bytes / speeds.bytes_per_s[tier] for tier, count in sizes.items())
        if seconds < len(tiers) * BLOCK_TOKENS / speed:
            fetch_s, fetched = seconds, len(tiers)
    # The last token is always computed: its logits are what the first sample needs.
    uncached = max(1, prompt_tokens - (device_blocks + fetched) * BLOCK_TOKENS)
    return Prediction(
        queue_s=rank.queued_tokens / speed,
        fetch_s=fetch_s,
        prefill_s=uncached / speed,
        device_blocks=device_blocks,
        cached_blocks=fetched,
        uncached_tokens=uncached,
    )
