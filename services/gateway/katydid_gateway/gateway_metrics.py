"""Every figure the gateway exports, in one place: what operators set alerts and scaling rules on."""

from __future__ import annotations

from katydid_runtime.metrics import STEP_SECONDS, TOKENS, TPOT_SECONDS, TTFT_SECONDS, Metrics

from katydid_gateway.requests import CachedTokens, Usage

__all__ = ["GatewayMetrics"]

_DRIFT_TOKENS = (0, 64, 256, 1024, 4096, 16384, 65536)


class GatewayMetrics:
    """The gateway's metrics; `render` gives the text for /metrics."""

    def __init__(self) -> None:
        self.metrics = metrics = Metrics("gateway")
        self.render = metrics.render
        self.finished = metrics.counter("finished_requests", "Requests ended, by api and outcome", ("api", "outcome"))
        self.in_flight = metrics.gauge("in_flight_requests", "Requests being answered now")
        self.ttft = metrics.histogram("ttft_seconds", "Receipt of a request to its first output", bounds=TTFT_SECONDS)
        self.tpot = metrics.histogram("tpot_seconds", "Mean time per output token after the first", bounds=TPOT_SECONDS)
        self.phase = metrics.histogram(
            "ttft_phase_seconds", "Parts of the time to first token", ("phase",), bounds=(*STEP_SECONDS, 10.0, 60.0)
        )
        self.prompt_tokens = metrics.histogram("prompt_tokens", "Prompt tokens of a request", bounds=TOKENS)
        self.output_tokens = metrics.counter("output_tokens", "Output tokens delivered")
        self.cached_tokens = metrics.counter("cached_tokens", "Prompt tokens found in a cache, by tier", ("tier",))
        self.computed_tokens = metrics.counter("computed_tokens", "Prompt tokens found in no cache")
        self.drift = metrics.histogram(
            "predicted_cache_drift_tokens",
            "Difference between the cached tokens routing predicted and those found",
            bounds=_DRIFT_TOKENS,
        )
        self.routed = metrics.counter("routed_requests", "Requests sent, by engine", ("engine",))
        self.failed = metrics.counter("failed_requests", "Requests an engine failed or refused", ("engine",))
        self.queued = metrics.gauge("queued_requests", "Requests that wait here for an engine, by class", ("priority",))
        self.shed = metrics.counter("shed_requests", "Requests refused before any work, by reason", ("reason",))
        self.resumed = metrics.counter(
            "resumed_choices", "Choices that went on elsewhere in mid-answer, by the engine that was lost", ("engine",)
        )
        self.connected = metrics.gauge("connected_engines", "1 while the engine's session is up", ("engine",))
        self.refused = metrics.counter(
            "refused_engines", "Times an engine failed the parity check", ("engine", "field")
        )

    def settled(self, usage: Usage) -> None:
        """Count a request's tokens once, at its end."""
        self.prompt_tokens.observe(usage.prompt_tokens)
        self.output_tokens.inc(usage.completion_tokens)
        self.computed_tokens.inc(max(0, usage.prompt_tokens - usage.cached.total))
        for tier in CachedTokens.__dataclass_fields__:
            self.cached_tokens.labels(tier).inc(getattr(usage.cached, tier))
