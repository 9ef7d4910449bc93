"""Every figure the gateway exports, in one place: what operators set alerts and scaling rules on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from katydid_runtime.metrics import (
    STEP_SECONDS,
    TOKENS,
    TPOT_SECONDS,
    TPOT_TARGET_S,
    TTFT_SECONDS,
    TTFT_TARGET_S,
    Metrics,
)

from katydid_gateway.requests import CachedTokens, Usage

if TYPE_CHECKING:
    from prometheus_client import Histogram

__all__ = ["GatewayMetrics"]

_DRIFT_TOKENS = (0, 64, 256, 1024, 4096, 16384, 65536)
# Tenants with series of their own; the ones that come after them share the name "other".
MOST_TENANTS = 64


class GatewayMetrics:
    """The gateway's metrics; `render` gives the text for /metrics."""

    def __init__(self, *, several_processes: bool = False) -> None:
        self.metrics = metrics = Metrics("gateway", several_processes=several_processes)
        self.registry = metrics.registry
        self.render = metrics.render
        self.finished = metrics.counter("finished_requests", "Requests ended, by api and outcome", ("api", "outcome"))
        self.in_flight = metrics.gauge("in_flight_requests", "Requests being answered now", add_up=True)
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
        self.predictions_found = metrics.gauge(
            "predicted_cache_found_ratio", "Share of tokens predicted in caches that were found there", ("engine",)
        )
        self.index_bytes = metrics.gauge(
            "index_bytes", "Memory of what is known of engines' and cache instances' blocks", add_up=True
        )
        self.handed_off = metrics.counter(
            "handed_off_choices",
            "Choices whose prompt one engine computed and another continued, by giver",
            ("engine",),
        )
        self.routed = metrics.counter("routed_requests", "Requests sent, by engine", ("engine",))
        self.failed = metrics.counter("failed_requests", "Requests an engine failed or refused", ("engine",))
        self.queued = metrics.gauge(
            "queued_requests", "Requests that wait here for an engine, by class", ("priority",), add_up=True
        )
        self.turned_away = metrics.counter(
            "turned_away_requests", "Calls of strangers, or beyond a share, refused before they were read", ("reason",)
        )
        self.shed = metrics.counter("shed_requests", "Requests refused before any work, by reason", ("reason",))
        self.resumed = metrics.counter(
            "resumed_choices", "Choices that went on elsewhere in mid-answer, by the engine that was lost", ("engine",)
        )
        self.connected = metrics.gauge("connected_engines", "1 while the engine's session is up", ("engine",))
        self.refused = metrics.counter(
            "refused_engines", "Times an engine failed the parity check", ("engine", "field")
        )

        self.ill = metrics.gauge("ill_engines", "1 while a connected engine hangs or is stuck", ("engine",))
        self.goodput = metrics.counter(
            "goodput_requests",
            "Requests that did not fail, and whose times to first token and per token both met the targets",
        )
        self.tenant_requests = metrics.counter("tenant_requests", "Requests ended, by tenant", ("tenant", "outcome"))
        self.tenant_tokens = metrics.counter(
            "tenant_tokens", "Tokens by tenant: cached and computed prompt, output", ("tenant", "kind")
        )
        role = ("role",)
        self.desired_replicas = metrics.gauge("desired_replicas", "Engines of the role there should be", role)
        self.needed_replicas = metrics.gauge(
            "needed_replicas", "Engines of the role that one kind of work alone would need", ("role", "work")
        )
        self.ready_replicas = metrics.gauge("ready_replicas", "Engines of the role that take work", role)
        self.draining_replicas = metrics.gauge("draining_replicas", "Engines of the role that finish their work", role)
        self.prefill_backlog = metrics.gauge(
            "prefill_backlog_seconds", "Time the ready engines need for the prompts that wait", role
        )
        self.decode_headroom = metrics.gauge(
            "decode_headroom_seconds", "Time until KV pages are full if every token made now stayed", role
        )
        self.cache_pressure = metrics.gauge("cache_pressure_ratio", "Share of KV pages that running choices hold", role)
        # Looking a label up takes as long as counting; and a tier that nothing was found in has a series, of zero.
        self._tiers = {tier: self.cached_tokens.labels(tier) for tier in CachedTokens.__dataclass_fields__}
        self._tenants: set[str] = set()
        self._phases: dict[str, Histogram] = {}

    def answered(self, ttft_s: float, tpot_s: float, tokens: int, trace_id: str, *, well: bool) -> None:
        """Time an answer of `tokens` tokens in its longest choice, and whether it ended `well`; the trace id marks its
        buckets."""
        exemplar = {"trace_id": trace_id} if trace_id else None
        self.ttft.observe(ttft_s, exemplar)
        if tokens > 1:
            self.tpot.observe(tpot_s, exemplar)
        if well and ttft_s <= TTFT_TARGET_S and tpot_s <= TPOT_TARGET_S:
            self.goodput.inc()

    def spent(self, phases_s: Mapping[str, float]) -> None:
        """The phases of one answer's time to first token."""
        for name, seconds in phases_s.items():
            series = self._phases.get(name)
            if series is None:
                series = self._phases[name] = self.phase.labels(name)
            series.observe(max(0.0, seconds))

    def ended(self, tenant: str, outcome: str, usage: Usage) -> None:
        """Count a request for its tenant; without API keys there are none."""
        if not tenant:
            return
        if tenant not in self._tenants:
            if len(self._tenants) >= MOST_TENANTS:
                tenant = "other"
            self._tenants.add(tenant)
        self.tenant_requests.labels(tenant, outcome).inc()
        kinds = {"cached": usage.cached.total, "computed": usage.prompt_tokens - usage.cached.total}
        for kind, tokens in (*kinds.items(), ("output", usage.completion_tokens)):
            self.tenant_tokens.labels(tenant, kind).inc(max(0, tokens))

    def settled(self, usage: Usage) -> None:
        """Count a request's tokens once, at its end."""
        self.prompt_tokens.observe(usage.prompt_tokens)
        self.output_tokens.inc(usage.completion_tokens)
        self.computed_tokens.inc(max(0, usage.prompt_tokens - usage.cached.total))
        if usage.cached.total:
            for tier, series in self._tiers.items():
                series.inc(getattr(usage.cached, tier))
