"""Searching one chain at many instances, with clients that answer when and what a script says, in simulated time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import pytest
from katydid_cache import chain_search
from katydid_cache.chain_search import ChainSearch, Searched
from katydid_cache.hot_runs import HotRuns
from katydid_cache.placement import rank, run_starts
from katydid_cache.records import LookupResult, Tier, TierRun

T = TypeVar("T")

HEDGE_S = 0.03
NAMES = ("a:1", "b:1", "c:1")
CHAIN = [bytes([number]) * 32 for number in range(12)]
RUNS = run_starts(0, 12, 4)
HEADS = {run: CHAIN[run.start] for run in RUNS}
HOME = {run: rank(HEADS[run], NAMES) for run in RUNS}


class Clock(selectors.DefaultSelector):
    """Time of a loop that waits for nothing but time: it passes at once."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now += timeout or 0.0
        return super().select(0)


def simulated(main: Coroutine[Any, Any, T]) -> T:
    clock = Clock()

    def made() -> asyncio.SelectorEventLoop:
        loop = asyncio.SelectorEventLoop(clock)
        loop.time = clock.monotonic  # type: ignore[method-assign]
        return loop

    with mock.patch.object(chain_search, "time", clock), asyncio.Runner(loop_factory=made) as runner:
        return runner.run(main)


@dataclass
class Scripted:
    """A member: holds some blocks, answers after a while, and counts."""

    held: set[bytes] = field(default_factory=set)
    delay_s: float = 0.0
    hedge_s: float = HEDGE_S
    calls: int = 0
    asked: list[bytes] = field(default_factory=list)

    @property
    def client(self) -> Scripted:
        return self

    def took(self, lookup_s: float) -> None:
        assert lookup_s >= 0

    async def lookup(self, hashes: bytes, *, lease: bool, timeout_s: float, trace: object) -> LookupResult:
        assert trace is None
        self.calls += 1
        names = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
        self.asked += names
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(self.delay_s)
        except TimeoutError:
            return LookupResult(reachable=False)
        found = next((at for at, name in enumerate(names) if name not in self.held), len(names))
        runs = (TierRun(Tier.MEMORY, found, 0.0),) if found else ()
        return LookupResult(found, runs, lease=100 + self.calls if lease and found else 0)


class Fleet:
    def __init__(self, *, unsettled: bool = False) -> None:
        self.members = {name: Scripted() for name in NAMES}
        self.unsettled = unsettled
        self.given_back: list[tuple[str, int]] = []
        self.usable = list(NAMES)

    def loads(self) -> dict[str, float]:
        return dict.fromkeys(NAMES, 0.0)

    def __getitem__(self, name: str) -> Scripted:
        return self.members[name]

    def get(self, name: str) -> Scripted | None:
        return self.members.get(name)

    def hold(self, rank_of: int = 0) -> None:
        for run in RUNS:
            self.members[HOME[run][rank_of]].held |= {CHAIN[place] for place in run}

    async def search(self, *, timeout_s: float = 1.0, hot: HotRuns | None = None) -> Searched:
        members: Any = self
        search = ChainSearch(members, hot or HotRuns(), lambda name, lease: self.given_back.append((name, lease)))
        return await search.run(CHAIN, RUNS, HEADS, lease=True, timeout_s=timeout_s, trace=None)


def run(fleet: Fleet, **options: Any) -> tuple[Searched, float]:
    async def body() -> tuple[Searched, float]:
        searched = await fleet.search(**options)
        elapsed_s = asyncio.get_running_loop().time()
        # Whatever comes late is dealt with before the loop ends.
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))
        await asyncio.sleep(0)
        return searched, elapsed_s

    return simulated(body())


def homes() -> set[str]:
    return {HOME[each][0] for each in RUNS}


def test_a_quiet_fleet_is_asked_once_a_home() -> None:
    assert len(homes()) > 1, "the runs would all be one instance's"
    fleet = Fleet()
    fleet.hold()
    searched, _ = run(fleet)
    assert searched.prefix.owners == tuple(HOME[each][0] for each in RUNS for _ in each)
    assert {name: member.calls for name, member in fleet.members.items() if member.calls} == dict.fromkeys(homes(), 1)
    assert set(searched.leases) == homes()
    assert fleet.given_back == []


def test_an_empty_fleet_is_asked_once_when_nothing_has_moved_and_twice_when_something_has() -> None:
    quiet, moved = Fleet(), Fleet(unsettled=True)
    for fleet in (quiet, moved):
        searched, _ = run(fleet)
        assert searched.prefix.blocks == 0
        assert searched.answered
    assert sum(member.calls for member in quiet.members.values()) == len(homes())
    assert sum(member.calls for member in moved.members.values()) > len(homes())


def test_what_was_placed_before_somebody_joined_is_found_at_the_next_in_rank() -> None:
    fleet = Fleet(unsettled=True)
    fleet.hold(rank_of=1)
    searched, _ = run(fleet)
    assert searched.prefix.owners == tuple(HOME[each][1] for each in RUNS for _ in each)


def test_a_home_that_hangs_costs_its_hedge_and_a_late_lease_is_given_back() -> None:
    fleet = Fleet()
    fleet.hold()
    fleet.hold(rank_of=1)
    slow = HOME[RUNS[0]][0]
    fleet[slow].delay_s = 0.4
    searched, elapsed_s = run(fleet)
    assert searched.prefix.blocks == len(CHAIN)
    assert slow not in searched.prefix.owners
    assert elapsed_s == pytest.approx(HEDGE_S)
    assert [name for name, _ in fleet.given_back] == [slow]
    assert slow not in searched.leases


def test_a_home_that_is_late_is_waited_for_a_moment_when_its_second_has_nothing() -> None:
    fleet = Fleet()
    fleet.hold()
    slow = HOME[RUNS[0]][0]
    fleet[slow].delay_s = 0.2
    searched, elapsed_s = run(fleet)
    assert searched.prefix.owners == tuple(HOME[each][0] for each in RUNS for _ in each)
    assert elapsed_s == pytest.approx(0.2)
    assert fleet.given_back == []


def test_a_home_alone_is_waited_for_until_the_timeout() -> None:
    fleet = Fleet()
    fleet.usable = [NAMES[0]]
    fleet[NAMES[0]].held |= set(CHAIN)
    fleet[NAMES[0]].delay_s = 0.9
    searched, elapsed_s = run(fleet)
    assert searched.prefix.blocks == len(CHAIN)
    assert elapsed_s == pytest.approx(0.9)


def test_a_home_that_hangs_with_nothing_elsewhere_costs_that_moment_and_no_more() -> None:
    fleet = Fleet()
    fleet.hold()
    slow = HOME[RUNS[0]][0]
    fleet[slow].delay_s = 5.0
    searched, elapsed_s = run(fleet, timeout_s=0.5)
    assert searched.prefix.blocks == 0
    assert elapsed_s == pytest.approx(0.25)
    # Leases over runs behind the gap are of no use.
    assert {name for name, _ in fleet.given_back} == homes() - {slow}


def test_a_search_that_is_given_up_leaves_no_lease_behind() -> None:
    fleet = Fleet()
    fleet.hold()
    for number, name in enumerate(sorted(homes())):
        fleet[name].delay_s = 0.02 * number
        fleet[name].hedge_s = 1.0

    async def body() -> None:
        search = asyncio.create_task(fleet.search())
        await asyncio.sleep(0.01)
        search.cancel()
        await asyncio.gather(search, return_exceptions=True)
        await asyncio.sleep(0.1)

    simulated(body())
    assert {name for name, _ in fleet.given_back} == homes()


@pytest.mark.parametrize("delay_s", [0.0, 5.0])
def test_when_all_hang_the_timeout_ends_it(delay_s: float) -> None:
    fleet = Fleet()
    for member in fleet.members.values():
        member.delay_s = 5.0
        member.hedge_s = 0.01 + delay_s
    searched, elapsed_s = run(fleet, timeout_s=0.2)
    assert searched.prefix.blocks == 0
    assert not searched.answered
    assert elapsed_s == pytest.approx(0.2)


def test_a_replica_is_asked_where_the_home_lost_its_copy() -> None:
    fleet = Fleet()
    fleet.hold()
    first = RUNS[0]
    home, second, _ = HOME[first]
    lost: Sequence[bytes] = [CHAIN[place] for place in first]
    fleet[home].held -= set(lost)
    fleet[second].held |= set(lost)
    hot = HotRuns()
    assert run(fleet)[0].prefix.blocks == 0
    hot.put_at(HEADS[first], second)
    assert run(fleet, hot=hot)[0].prefix.owners[:4] == (second,) * 4


def test_an_instance_that_leaves_before_it_is_asked_has_nothing() -> None:
    fleet = Fleet(unsettled=True)
    fleet.hold(1)
    gone = HOME[RUNS[0]][1]

    async def leave() -> None:
        await asyncio.sleep(HEDGE_S / 2)
        del fleet.members[gone]

    async def body() -> Searched:
        for run in RUNS:
            fleet.members[HOME[run][0]].delay_s = HEDGE_S
        leaving = asyncio.create_task(leave())
        searched = await fleet.search()
        await leaving
        return searched

    searched = simulated(body())
    assert searched.prefix.blocks == 0
    assert searched.answered
