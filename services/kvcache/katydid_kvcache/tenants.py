"""What each tenant got out of the cache: tokens and bytes found by tier, tokens missed, writes refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from katydid_cache.records import Tier, TierRun

from katydid_kvcache.blocks import Namespace

__all__ = ["TENANTS_TOLD_APART", "TenantFigures", "Tenants"]

TENANTS_TOLD_APART = 256
"""Beyond so many, tenants are counted together with those that have no id: figures must not grow with callers."""


@dataclass(slots=True)
class TenantFigures:
    """Counts since the start; see TenantStats in the protocol."""

    hit_tokens: Counter[Tier] = field(default_factory=Counter)
    hit_bytes: Counter[Tier] = field(default_factory=Counter)
    missed_tokens: int = 0
    refused: int = 0
    shared_hits: int = 0


class Tenants:
    """Figures by tenant. `prefill_tokens_per_s` turns tokens found into prefill time saved."""

    def __init__(self, prefill_tokens_per_s: float) -> None:
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._figures: dict[bytes, TenantFigures] = {b"": TenantFigures()}

    def of(self, tenant: bytes) -> TenantFigures:
        """The figures that count for a tenant."""
        figures = self._figures.get(tenant)
        if figures is None:
            if len(self._figures) > TENANTS_TOLD_APART:
                return self._figures[b""]
            figures = self._figures[tenant] = TenantFigures()
        return figures

    def count_lookup(self, namespace: Namespace, tenant: bytes, asked: int, runs: Sequence[TierRun]) -> None:
        """A tenant asked for `asked` blocks and got those in `runs`."""
        figures, layout = self.of(tenant), namespace.layout
        for run in runs:
            figures.hit_tokens[run.tier] += run.blocks * layout.block_tokens
            figures.hit_bytes[run.tier] += run.blocks * layout.block_bytes
        figures.missed_tokens += (asked - sum(run.blocks for run in runs)) * layout.block_tokens

    def saved_prefill_s(self, figures: TenantFigures) -> float:
        """Seconds of prefill that the tokens found would have cost."""
        return figures.hit_tokens.total() / self._prefill_tokens_per_s

    def __iter__(self) -> Iterator[tuple[bytes, TenantFigures]]:
        return iter(self._figures.items())
