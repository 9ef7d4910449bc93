"""Prometheus metrics under one naming rule: `katydid_<service>_<what>_<unit>`, in a registry of the process's own.

The bounds contain the service-level targets themselves (TTFT 4 s, TPOT 50 ms), so that attainment can be read from a
histogram instead of being interpolated between two buckets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

__all__ = [
    "SHARED_METRICS",
    "STEP_SECONDS",
    "TEXT_TYPE",
    "TOKENS",
    "TPOT_SECONDS",
    "TPOT_TARGET_S",
    "TTFT_SECONDS",
    "TTFT_TARGET_S",
    "Metrics",
]

TTFT_TARGET_S = 4.0
TPOT_TARGET_S = 0.05

TTFT_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.5, 10.0, 20.0, 60.0)
TPOT_SECONDS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05, 0.06, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
STEP_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
TOKENS = (64, 256, 1024, 4096, 8192, 16384, 32768, 65536, 98304, 131072, 196608, 262144)

UNITS = (
    "seconds", "bytes", "tokens", "blocks", "pages", "requests", "choices", "preemptions", "ratio", "celsius",
    "clients", "leases", "engines", "caches", "lanes", "replicas", "rebalancings",
)  # fmt: skip

SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"
"""The variable that tells Prometheus' library the folder where processes of one service keep their metrics together."""
TEXT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_NAME = re.compile(rf"[a-z][a-z0-9_]*_(?:{'|'.join(UNITS)})")


class Metrics:
    """The metrics of one process. Names are given without prefix: `ttft_seconds`, `evicted_blocks`.

    Counters get Prometheus' own `_total` behind the unit. A name that ends in no unit raises ValueError. With
    `several_processes` each shows the figures of all that were started with the same folder in `SHARED_METRICS`.
    """

    def __init__(self, service: str, *, several_processes: bool = False) -> None:
        from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector, disable_created_metrics

        # A second series for every counter and histogram, which says what the first scrape says.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry: CollectorRegistry = CollectorRegistry()
        self._several_processes = several_processes
        self._prefix = f"katydid_{service}_"
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        from prometheus_client import Counter

        return Counter(self._full(name), help_text, labels, registry=self.registry)

    def gauge(self, name: str, help_text: str, labels: Sequence[str] = (), *, add_up: bool = False) -> Gauge:
        """Of several processes of one service the largest is shown, or with `add_up` the sum."""
        from prometheus_client import Gauge

        mode: Literal["livesum", "livemax"] = "livesum" if add_up else "livemax"
        return Gauge(self._full(name), help_text, labels, registry=self.registry, multiprocess_mode=mode)

    def histogram(self, name: str, help_text: str, labels: Sequence[str] = (), *, bounds: Sequence[float]) -> Histogram:
        from prometheus_client import Histogram

        return Histogram(self._full(name), help_text, labels, registry=self.registry, buckets=bounds)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Everything registered, and its content type: OpenMetrics, which has exemplars, for a scraper whose Accept
        header names it; else Prometheus' own text."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder
        from prometheus_client.multiprocess import MultiProcessCollector

        encode, content_type = choose_encoder(accept)
        registry = self.registry
        if self._several_processes:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return encode(registry), content_type

    def _full(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"metric name {name!r} must be snake case and end in one of {', '.join(UNITS)}")
        return self._prefix + name
