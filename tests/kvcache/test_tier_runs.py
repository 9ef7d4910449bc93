"""Runs of a prefix by tier, and the time until each of them is in memory."""

from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from katydid_cache.records import Tier
from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.read_speeds import ReadSpeeds
from katydid_kvcache.shared.manifest import Location
from katydid_kvcache.slabs import Slot
from katydid_kvcache.tier_runs import tier_runs

from tests.kvcache.running import IDENTITY, LAYOUT

SPACE = Namespace(IDENTITY, LAYOUT)
SLOT = Slot(0, 0, 1)


def block(tier: Tier) -> Block:
    made = Block(SPACE, bytes(32), b"")
    made.memory = SLOT if tier is Tier.MEMORY else None
    made.disk = SLOT if tier in (Tier.MEMORY, Tier.DISK) else None
    made.shared = Location("pack", 0, b"", 0)
    return made


@given(st.lists(st.sampled_from(Tier), max_size=30))
def test_runs_are_the_prefix_and_their_times_add_up(tiers: list[Tier]) -> None:
    speeds = ReadSpeeds()
    speeds.note(Tier.DISK, SPACE.slot_bytes, 0.001)
    speeds.note(Tier.SHARED, SPACE.slot_bytes, 0.01)
    runs = tier_runs(speeds, SPACE, [block(tier) for tier in tiers])
    assert [(run.tier, run.blocks) for run in runs] == [(tier, len([*same])) for tier, same in groupby(tiers)]
    behind = 0
    for run in runs:
        behind += run.blocks
        before = tiers[:behind]
        expected = (
            0.0 if run.tier is Tier.MEMORY else before.count(Tier.DISK) * 0.001 + before.count(Tier.SHARED) * 0.01
        )
        assert run.eta_s == pytest.approx(expected)
