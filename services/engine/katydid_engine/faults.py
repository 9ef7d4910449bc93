"""Delays injected on purpose, one a phase, so that a test can slow each phase and see that it and no other grows."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

__all__ = ["FaultDelays"]


@dataclass(frozen=True, slots=True)
class FaultDelays:
    """Milliseconds by phase.

    ``queue`` passes before a request may be admitted, ``lookup`` and ``fetch`` before each such call to the cache
    service, ``prefill`` in every step with prompt tokens, ``decode`` in every step without.
    """

    queue: float = 0.0
    lookup: float = 0.0
    fetch: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """``"queue:50,decode:5"``. Raises ValueError naming the part that is wrong."""
        allowed = [field.name for field in fields(cls)]
        values: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, delay = part.partition(":")
            if name not in allowed:
                raise ValueError(f"{part!r}: expected one of {', '.join(allowed)}, then a colon and milliseconds")
            try:
                values[name] = float(delay)
            except ValueError:
                raise ValueError(f"{part!r}: expected milliseconds after the colon") from None
            if not 0 <= values[name] <= 60_000:
                raise ValueError(f"{part!r}: expected 0 to 60000 milliseconds")
        return cls(**values)
