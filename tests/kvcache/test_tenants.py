"""Figures by tenant: what was found and missed, in tokens and bytes, of not more tenants than can be told apart."""

from __future__ import annotations

from katydid_cache.records import Tier, TierRun
from katydid_kvcache.blocks import Namespace
from katydid_kvcache.tenants import TENANTS_TOLD_APART, Tenants

from tests.kvcache.running import IDENTITY, LAYOUT

SPACE = Namespace(IDENTITY, LAYOUT)


def test_a_lookup_counts_what_was_found_where_and_the_rest_as_missed() -> None:
    tenants = Tenants(prefill_tokens_per_s=640.0)
    runs = [TierRun(Tier.MEMORY, 3, 0.0), TierRun(Tier.DISK, 2, 0.1), TierRun(Tier.MEMORY, 1, 0.1)]
    tenants.count_lookup(SPACE, b"t" * 16, 10, runs)
    figures = tenants.of(b"t" * 16)
    assert figures.hit_tokens == {Tier.MEMORY: 4 * 64, Tier.DISK: 2 * 64}
    assert figures.hit_bytes == {Tier.MEMORY: 4 * LAYOUT.block_bytes, Tier.DISK: 2 * LAYOUT.block_bytes}
    assert figures.missed_tokens == 4 * 64
    assert tenants.saved_prefill_s(figures) == 6 * 64 / 640.0


def test_beyond_so_many_tenants_the_others_are_counted_together() -> None:
    tenants = Tenants(prefill_tokens_per_s=1.0)
    for number in range(2 * TENANTS_TOLD_APART):
        tenants.count_lookup(SPACE, number.to_bytes(16, "big"), 1, [])
    counted = dict(tenants)
    assert len(counted) == TENANTS_TOLD_APART + 1
    assert counted[b""].missed_tokens == TENANTS_TOLD_APART * 64
    assert sum(figures.missed_tokens for figures in counted.values()) == 2 * TENANTS_TOLD_APART * 64
