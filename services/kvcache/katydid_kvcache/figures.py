"""Prometheus metrics of the cache: latencies and bytes as they happen, the books of the tiers once a second."""

from __future__ import annotations

from typing import Any

from katydid_runtime.metrics import STEP_SECONDS, Metrics

from katydid_kvcache.cache import Cache
from katydid_kvcache.tenant_metrics import TenantMetrics
from katydid_kvcache.tier_books import TierBooks

__all__ = ["Figures"]

_COUNTED = {
    "hits": ("hit_blocks", "Blocks looked up and found in the tier"),
    "misses": ("missed_blocks", "Blocks looked up and found neither in the tier nor in a higher one"),
    "writes": ("written_blocks", "Blocks that entered the tier"),
    "evictions": ("evicted_blocks", "Blocks evicted from the tier for room"),
    "corrupt": ("corrupt_blocks", "Blocks of the tier whose checksum was wrong"),
}


class Figures:
    """The metrics of one cache service; `update` copies the tiers' books."""

    def __init__(self, metrics: Metrics) -> None:
        self.lookup_seconds = metrics.histogram("lookup_seconds", "Time of a Lookup", bounds=STEP_SECONDS)
        self.get_seconds = metrics.histogram("get_seconds", "Time of a Get", bounds=STEP_SECONDS)
        self.put_seconds = metrics.histogram("put_seconds", "Time of a Put", bounds=STEP_SECONDS)
        self.lane_seconds = metrics.histogram("lane_seconds", "Time of an OpenLane", bounds=STEP_SECONDS)
        self.pull_seconds = metrics.histogram("pull_seconds", "Time of a Pull", bounds=STEP_SECONDS)
        self._traffic = {
            field: metrics.counter(field, help_text)
            for field, help_text in (
                ("sent_bytes", "Payload bytes sent by streams and bulk lanes"),
                ("received_bytes", "Payload bytes received by streams"),
                ("pulled_blocks", "Blocks pulled from other instances"),
                ("pulled_bytes", "Payload bytes pulled from other instances"),
                ("broken_lanes", "Bulk lanes that broke before their receipt"),
            )
        }
        self._read_speed = metrics.gauge(
            "read_speed_bytes", "Measured speed of reads, a second", ["tier", "up_to_bytes"]
        )
        self._pinned = metrics.gauge("pinned_blocks", "Blocks that an operator keeps")
        self._counters = {
            field: metrics.counter(name, help_text, ["tier"]) for field, (name, help_text) in _COUNTED.items()
        }
        self._shed = metrics.counter("shed_blocks", "Writes to the tier given up, by reason", ["tier", "reason"])
        self._kept = metrics.gauge("kept_blocks", "Blocks in the tier", ["tier"])
        self._kept_bytes = metrics.gauge("kept_bytes", "Payload bytes in the tier", ["tier"])
        self._capacity = metrics.gauge("capacity_bytes", "Bytes the tier may hold", ["tier"])
        self._hit_ratio = metrics.gauge(
            "expected_hit_ratio",
            "Share of the blocks looked up lately that a tier of another size would find",
            ["tier", "capacity_bytes", "admission"],
        )
        self._leased = metrics.gauge("held_leases", "Leases held now")
        self._attached = metrics.gauge("attached_clients", "Clients attached now")
        self._quarantined = metrics.gauge("quarantined_blocks", "Slots taken out of use because of wrong bytes")
        self._scrubbed = metrics.counter("scrubbed_bytes", "Bytes read again in the background to find wrong ones")
        self._scrubbed_blocks = metrics.counter("scrubbed_blocks", "Blocks read again in the background")
        self._queued = metrics.gauge("disk_queue_bytes", "Bytes on their way to disk")
        self._shared_queued = metrics.gauge("shared_queue_bytes", "Bytes on their way to the shared store")
        self._tenants = TenantMetrics(metrics)
        self._seen: dict[tuple[str, str], int] = {}

    def update(self, cache: Cache) -> None:
        """Bring counters and gauges up to the cache's books."""
        for books in (*cache.store.tiers, cache.store.shared):
            if books is None:
                continue
            tier = books.tier.name.lower()
            for field, counter in self._counters.items():
                self._follow(counter.labels(tier), (field, tier), getattr(books.counters, field))
            for reason, blocks in books.counters.sheds.items():
                self._follow(self._shed.labels(tier, reason), (reason, tier), blocks)
            self._kept.labels(tier).set(books.blocks)
            self._kept_bytes.labels(tier).set(books.bytes)
            if isinstance(books, TierBooks):
                self._capacity.labels(tier).set(books.slots.capacity_bytes)
                for point in books.ghosts.hit_rates():
                    self._hit_ratio.labels(tier, point.capacity_bytes, "all").set(point.admit_all)
                    self._hit_ratio.labels(tier, point.capacity_bytes, "second_touch").set(point.second_touch)
        self._tenants.update(cache)
        for field, counter in self._traffic.items():
            value = getattr(cache.traffic, field)
            counter.inc(value - self._seen.get((field, ""), 0))
            self._seen[field, ""] = value
        for kind, size, speed in cache.speeds:
            self._read_speed.labels(kind.name.lower(), size).set(speed)
        self._pinned.set(len(cache.pins))
        self._leased.set(len(cache.leases))
        self._attached.set(len(cache.attachments))
        self._quarantined.set(cache.quarantined)
        self._follow(self._scrubbed, ("scrubbed", ""), cache.scrubber.bytes)
        self._follow(self._scrubbed_blocks, ("scrubbed_blocks", ""), cache.scrubber.blocks)
        self._queued.set(cache.writer.bytes_in_flight)
        self._shared_queued.set(0 if cache.shared is None else cache.shared.bytes_in_flight)

    def _follow(self, counter: Any, name: tuple[str, str], value: int) -> None:
        """Bring a counter up to a value that only grows."""
        counter.inc(value - self._seen.get(name, 0))
        self._seen[name] = value
