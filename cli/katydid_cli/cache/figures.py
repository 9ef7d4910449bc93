"""Figures of cache services as rows of text, and rates between two looks. Pure."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from katydid_cache import BlockInfo, CacheStats, NamespaceInfo, Tier, TierStats

__all__ = [
    "SPEEDS_HEAD",
    "TENANTS_HEAD",
    "TIERS_HEAD",
    "TOP_HEAD",
    "WHAT_IF_HEAD",
    "bytes_text",
    "counted",
    "jsonable",
    "speed_rows",
    "tenant_rows",
    "tier_rows",
    "top_row",
    "what_if_rows",
]

TIERS_HEAD = ("tier", "blocks", "bytes", "of", "hit rate", "hits", "misses", "writes", "evicted", "shed", "corrupt")
TENANTS_HEAD = (
    "tenant",
    *("from memory", "from disk", "from shared", "missed"),
    *("bytes hit", "bytes held", "prefill saved", "refused", "of others"),
)
WHAT_IF_HEAD = ("tier", "if it had", "hit rate", "admitting the second time")
SPEEDS_HEAD = ("tier", "reads up to", "speed")
TOP_HEAD = (
    "instance",
    "clients",
    "leases",
    "memory",
    "disk",
    "hits/s",
    "misses/s",
    "writes/s",
    "evicted/s",
    "out",
    "in",
)

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(size: float) -> str:
    """1536 as "1.5 KiB"."""
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return f"{size:.0f} {_UNITS[unit]}" if unit == 0 or size >= 100 else f"{size:.1f} {_UNITS[unit]}"


def counted(number: int, what: str) -> str:
    """1 as "1 block", 2 as "2 blocks"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def tier_rows(stats: CacheStats) -> list[tuple[str, ...]]:
    """A row a tier under `TIERS_HEAD`."""
    return [
        (
            tier.name.lower(),
            str(figures.blocks),
            bytes_text(figures.bytes),
            bytes_text(figures.capacity_bytes) if figures.capacity_bytes else "-",
            _share(figures.hits, figures.hits + figures.misses),
            *map(str, (figures.hits, figures.misses, figures.writes)),
            *map(str, (figures.evictions, figures.shed, figures.corrupt)),
        )
        for tier, figures in stats.tiers.items()
    ]


def speed_rows(stats: CacheStats) -> list[tuple[str, ...]]:
    """A row a measured speed under `SPEEDS_HEAD`."""
    return [
        (each.tier.name.lower(), bytes_text(each.up_to_bytes), f"{bytes_text(each.bytes_per_s)}/s")
        for each in stats.speeds
    ]


def tenant_rows(stats: CacheStats) -> list[tuple[str, ...]]:
    """A row a tenant under `TENANTS_HEAD`; those that are not told apart have no id."""
    return [
        (
            tenant.hex() or "-",
            *(str(sum(tier.hit_tokens for kind, tier in each.tiers.items() if kind is wanted)) for wanted in Tier),
            str(each.missed_tokens),
            bytes_text(sum(tier.hit_bytes for tier in each.tiers.values())),
            bytes_text(sum(tier.bytes for tier in each.tiers.values())),
            f"{each.saved_prefill_s:.1f} s",
            str(each.refused),
            str(each.shared_hits),
        )
        for tenant, each in stats.tenants.items()
    ]


def what_if_rows(stats: CacheStats) -> list[tuple[str, ...]]:
    """A row a size that a tier might have, under `WHAT_IF_HEAD`."""
    return [
        (
            tier.name.lower(),
            bytes_text(point.capacity_bytes),
            f"{100 * point.admit_all:.1f} %",
            f"{100 * point.second_touch:.1f} %",
        )
        for tier, figures in stats.tiers.items()
        for point in figures.hit_rates
    ]


def top_row(name: str, before: CacheStats | None, now: CacheStats, elapsed_s: float) -> tuple[str, ...]:
    """A row under `TOP_HEAD`; a first look, or one after a restart, shows no rates."""
    again = before if before is not None and before.boot_epoch == now.boot_epoch and elapsed_s > 0 else None

    def rate(of: str) -> str:
        if again is None:
            return "-"
        return f"{(_total(now, of) - _total(again, of)) / elapsed_s:.0f}"

    def flow(of: str) -> str:
        return "-" if again is None else f"{bytes_text((getattr(now, of) - getattr(again, of)) / elapsed_s)}/s"

    return (
        name,
        str(now.attachments),
        str(now.leases),
        *(_used(now.tiers.get(tier)) for tier in (Tier.MEMORY, Tier.DISK)),
        rate("hits"),
        # What the last tier misses is missed.
        "-" if again is None else f"{(_missed(now) - _missed(again)) / elapsed_s:.0f}",
        rate("writes"),
        rate("evictions"),
        flow("sent_bytes"),
        flow("received_bytes"),
    )


def jsonable(record: CacheStats | NamespaceInfo | BlockInfo) -> dict[str, Any]:
    """A record as JSON has it: bytes in hex, enumerations by name."""
    plain: dict[str, Any] = _plain(dataclasses.asdict(record))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _used(figures: TierStats | None) -> str:
    return "-" if figures is None else _share(figures.bytes, figures.capacity_bytes)


def _total(stats: CacheStats, of: str) -> int:
    return sum(getattr(figures, of) for figures in stats.tiers.values())


def _missed(stats: CacheStats) -> int:
    return min((figures.misses for figures in stats.tiers.values()), default=0)
