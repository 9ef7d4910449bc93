"""Delays injected on purpose, one a phase, so that a test can slow each phase and see that it and no other grows."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FaultDelays"]


@dataclass(frozen=True, slots=True)
class FaultDelays:
    """Seconds by phase.

    ``queue`` passes before a request may be admitted, ``lookup`` and ``fetch`` before each such call to the cache
    service, ``prefill`` in every step with prompt tokens, ``decode`` in every step without.
    """

    queue: float = 0.0
    lookup: float = 0.0
    fetch: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
