"""Random faults under load: whatever dies or hangs, an answer is right or a typed error, and nothing stays."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet, Process
from tests.e2e.load import Ask, Failure, Load, Outcome, mixed_asks

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(900)]

CHAOS_S = 120.0
CLIENTS = 10
HANG_S = 90.0
TYPED = {"engine_lost", "unavailable", "draining", "overloaded"}
# Only a dead gateway answers like this.
CUT = {"transport: ConnectError", "transport: ReadError", "transport: RemoteProtocolError"}
EXPECTED_ERRORS = {
    "a step loop is stuck",
    "engine hangs, its requests are given up",
    "engine fails its requests",
    "a worker failed, the engine ends",
}


class Faults:
    """Breaks one process after the other and makes it good again."""

    def __init__(self, fleet: Fleet, dice: random.Random) -> None:
        self.done: Counter[str] = Counter()
        self._fleet = fleet
        self._dice = dice

    async def run(self, until: float, *groups: list[str]) -> None:
        """In each group of names, one process at a time; the next when the gateway has the engines again."""

        async def breaker(names: list[str]) -> None:
            while time.monotonic() < until:
                await asyncio.sleep(self._dice.uniform(0.5, 4))
                await self._break(self._dice.choice(names))
                if len(groups) == 1:
                    await self._fleet.whole()

        await asyncio.gather(*map(breaker, groups))

    async def _break(self, name: str) -> None:
        process = self._process(name)
        faults = [self._kill, self._kill, self._freeze, self._terminate]
        if name.startswith("engine"):
            faults += [self._freeze_workers, self._kill_worker]
        fault = self._dice.choice(faults)
        self.done[f"{fault.__name__.strip('_')} {name}"] += 1
        await fault(process)

    def _process(self, name: str) -> Process:
        return self._fleet.engines.get(name) or getattr(self._fleet, name)

    async def _kill(self, process: Process) -> None:
        await asyncio.to_thread(process.kill)
        await self._restart(process)

    async def _terminate(self, process: Process) -> None:
        process.terminate()
        await asyncio.to_thread(process.exit_code, 60)
        await self._restart(process)

    async def _kill_worker(self, process: Process) -> None:
        process.kill_worker()
        await asyncio.to_thread(process.exit_code, 60)
        await self._restart(process)

    async def _freeze(self, process: Process) -> None:
        await self._while_frozen(process, process.pids)

    async def _freeze_workers(self, process: Process) -> None:
        await self._while_frozen(process, process.workers)

    async def _while_frozen(self, process: Process, pids: list[int]) -> None:
        process.freeze(pids)
        await asyncio.sleep(self._dice.choice((0.3, 2, 7, 14)))
        process.thaw()

    async def _restart(self, process: Process) -> None:
        await asyncio.sleep(self._dice.uniform(0, 2))
        await asyncio.to_thread(process.start)


async def client(load: Load, asks: list[Ask], right: list[Outcome], dice: random.Random, until: float) -> Counter[str]:
    """One request after the other; now and then it leaves early."""
    seen: Counter[str] = Counter()
    while time.monotonic() < until:
        number = dice.randrange(len(asks))
        way = dice.choice((load.over_grpc, load.over_http))
        patience_s = dice.uniform(0.01, 1) if dice.random() < 0.1 else HANG_S
        try:
            async with asyncio.timeout(patience_s):
                outcome = await way(asks[number])
        except TimeoutError:
            assert patience_s < HANG_S, f"hangs: {asks[number]}"
            seen["left"] += 1
            continue
        if isinstance(outcome, Failure):
            assert outcome.code in TYPED | CUT, (asks[number], outcome)
            assert outcome.delivered or outcome.code != "engine_lost", "a request not begun goes to the other engine"
            seen[outcome.code] += 1
            await asyncio.sleep(0.5)
        else:
            assert outcome == right[number], (asks[number], outcome, right[number])
            seen["right"] += 1
    return seen


def zombies() -> list[str]:
    """Children of this process, and orphans of ours, that nobody waits for."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                name = (entry / "comm").read_text().strip()
            except OSError:
                continue
            if state == "Z" and name.startswith("python"):
                found.append(f"{entry.name} {name} of {parent}")
    return found


@pytest.mark.parametrize("seed", range(3))
def test_random_faults_under_load(fleet: Fleet, seed: int) -> None:
    fleet.expected_errors.update(EXPECTED_ERRORS)
    dice = random.Random(seed)
    asks = mixed_asks(32, seed=100 + seed)
    faults = Faults(fleet, dice)

    async def scenario() -> None:
        async with Load(fleet) as load:
            right = await load.one_at_a_time(asks)
            until = time.monotonic() + CHAOS_S
            breaking = asyncio.create_task(
                faults.run(until, ["engine-a", "engine-b"], ["kvcache", "kvcache", "gateway"])
            )
            clients = [client(load, asks, right, random.Random(seed * 100 + n), until) for n in range(CLIENTS)]
            seen: Counter[str] = sum(await asyncio.gather(*clients), Counter())
            await breaking
            await fleet.whole()
            await fleet.idle()
            print(f"\nseed {seed}: outcomes {dict(seen)}; faults {dict(faults.done)}")
            assert seen["right"] > 100
            assert await load.all_at_once(asks) == right, "after all of it, as good as before"

    asyncio.run(scenario())
    assert zombies() == []


def test_while_one_engine_lives_no_answer_is_lost(fleet: Fleet) -> None:
    fleet.expected_errors.update(EXPECTED_ERRORS)
    asks = mixed_asks(32, seed=9)
    faults = Faults(fleet, random.Random(9))

    async def scenario() -> None:
        async with Load(fleet) as load:
            right = await load.one_at_a_time(asks)
            until = time.monotonic() + CHAOS_S
            breaking = asyncio.create_task(faults.run(until, ["engine-a", "engine-b", "kvcache"]))
            clients = [client(load, asks, right, random.Random(n), until) for n in range(CLIENTS)]
            seen: Counter[str] = sum(await asyncio.gather(*clients), Counter())
            await breaking
            print(f"\noutcomes {dict(seen)}; faults {dict(faults.done)}")
            assert seen.keys() <= {"right", "left"}

    asyncio.run(scenario())


def test_memory_stays_flat_under_load(fleet: Fleet) -> None:
    """Two equal rounds of load: what the first leaves in caches and pools is there, the second adds next to nothing."""
    asks = mixed_asks(64, seed=77)

    async def rounds(count: int) -> None:
        async with Load(fleet) as load:
            for _ in range(count):
                await load.all_at_once(asks)
        await fleet.idle()

    asyncio.run(rounds(6))
    before = [process.own_mib() for process in fleet.processes]
    asyncio.run(rounds(12))
    after = [process.own_mib() for process in fleet.processes]
    grown = [new - old for old, new in zip(before, after, strict=True)]
    print(f"\nown memory in MiB: {before} -> {after}")
    assert max(grown) < 15
