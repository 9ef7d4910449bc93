"""What a request used and where its time went, as fields of a response."""

from __future__ import annotations

from typing import Any

from katydid_gateway.requests import Timing, Usage

__all__ = ["timing_fields", "usage_fields"]


def usage_fields(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object; the tiers beside cached_tokens are an addition."""
    cached = usage.cached
    tiers = {"device": cached.device, "memory": cached.memory, "disk": cached.disk, "shared": cached.shared}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached.total, "cached_tokens_by_tier": tiers},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def timing_fields(timing: Timing) -> dict[str, Any]:
    """An addition to OpenAI's objects: milliseconds, and the phases the time to first token is made of."""
    return {
        "ttft_ms": _milliseconds(timing.ttft_s),
        "tpot_ms": _milliseconds(timing.tpot_s),
        "phases_ms": {name: _milliseconds(seconds) for name, seconds in timing.phases_s.items()},
        "engine": timing.engine,
        "trace_id": timing.trace_id,
    }


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)
