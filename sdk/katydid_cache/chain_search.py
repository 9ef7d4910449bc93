"""Looks one chain up at many instances: all homes at once, and the next in rank for what a home owes an answer for.

A second choice is asked when a home has not answered by its hedge, or has nothing of a run while blocks may be
elsewhere (`Members.unsettled`, or a replica that this client knows of). A home that is late is waited for a moment
longer when the second has nothing: a pause of a few milliseconds must not have a whole prompt computed again. So a
slow instance costs a lookup its hedge, one that hangs a quarter of a second, a quiet fleet one call to each home, and
nothing takes longer than the timeout.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from katydid_runtime.trace_context import TraceContext

from katydid_cache.answers import Answer, Prefix, join, missing
from katydid_cache.hot_runs import HotRuns
from katydid_cache.members import Members
from katydid_cache.placement import pick, rank
from katydid_cache.records import LookupResult

__all__ = ["SLACK_BYTES", "ChainSearch", "Searched"]

_PATIENCE_S = 0.25
"""How long a home is waited for that is late while its second has nothing of the run: the longest hedge."""

Calls: TypeAlias = "dict[asyncio.Task[Answer], Sequence[range]]"

SLACK_BYTES = 256.0 * 2**20
"""An instance is not overloaded with less than this on its way, whatever the others have."""


@dataclass(frozen=True, slots=True)
class Searched:
    """The prefix found; the leases that keep it, by instance; how the usable instances rank for each run."""

    prefix: Prefix
    leases: Mapping[str, Sequence[int]]
    ranked: Mapping[range, Sequence[str]]
    answered: bool


class ChainSearch:
    """Searches over `members`, with what is known of replicas in `hot`; `give_back` releases a lease not needed."""

    def __init__(self, members: Members, hot: HotRuns, give_back: Callable[[str, int], None]) -> None:
        self._members = members
        self._hot = hot
        self._give_back = give_back

    async def run(
        self,
        names: Sequence[bytes],
        runs: Sequence[range],
        heads: Mapping[range, bytes],
        *,
        lease: bool,
        timeout_s: float,
        trace: TraceContext | None,
    ) -> Searched:
        """Search the chain `names` cut into `runs`, each named by its hash in `heads`; `runs` is not empty."""
        deadline = time.monotonic() + timeout_s
        usable = self._members.usable
        if not usable:
            return Searched(Prefix((), ()), {}, {}, answered=False)
        ranked = {run: rank(heads[run], usable) for run in runs}
        load = self._members.loads()
        first = {run: self._first(heads[run], ranked[run], load) for run in runs}

        def ask(choice: Mapping[range, str]) -> Calls:
            by_home: dict[str, list[range]] = {}
            for run, name in choice.items():
                by_home.setdefault(name, []).append(run)
            return {
                asyncio.create_task(self._ask(name, own, names, lease, timeout_s, trace)): own
                for name, own in by_home.items()
            }

        calls = ask(first)
        try:
            answers, prefix = await self._gather(calls, ask, runs, heads, ranked, first, deadline)
        except asyncio.CancelledError:
            for call in calls:
                call.add_done_callback(self._too_late)
            raise
        for call in calls:
            if not call.done():
                call.add_done_callback(self._too_late)
        reachable = any(answer.found.reachable for answer in answers)
        return Searched(prefix, self._leases(answers, prefix), ranked, answered=reachable)

    async def _gather(
        self,
        calls: Calls,
        ask: Callable[[Mapping[range, str]], Calls],
        runs: Sequence[range],
        heads: Mapping[range, bytes],
        ranked: Mapping[range, Sequence[str]],
        first: Mapping[range, str],
        deadline: float,
    ) -> tuple[list[Answer], Prefix]:
        """Wait for what is worth it, adding second choices to `calls`; the answers, and the prefix they give."""
        patient_until = min(deadline, time.monotonic() + _PATIENCE_S)
        hedge_s = max(self._members[name].hedge_s for name in first.values())
        await asyncio.wait(calls, timeout=min(hedge_s, max(deadline - time.monotonic(), 0.0)))
        answers = [call.result() for call in calls if call.done()]
        late = len(answers) < len(calls)
        elsewhere = {
            run: name
            for run in missing(runs, answers)
            if (name := _next(ranked[run], first[run])) is not None
            and (late or self._members.unsettled or self._hot.also_at(heads[run]))
        }
        seconds = ask(elsewhere)
        calls.update(seconds)
        prefix = join(runs, answers)
        while (end := next((run for run in runs if prefix.blocks < run.stop), None)) is not None:
            # Only of the run where the prefix ends may a call still lengthen it.
            waiting = {call for call, own in calls.items() if end in own and not call.done()}
            second_has_nothing = any(end in own and call.done() for call, own in seconds.items())
            left_s = (patient_until if second_has_nothing else deadline) - time.monotonic()
            if not waiting or left_s <= 0:
                break
            await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            answers = [call.result() for call in calls if call.done()]
            prefix = join(runs, answers)
        return answers, prefix

    def _first(self, head: bytes, ranked: Sequence[str], load: Mapping[str, float]) -> str:
        """Where to look first: at home, unless a replica is less loaded."""
        also = self._hot.also_at(head)
        choices = [name for name in ranked if name == ranked[0] or name in also]
        return pick(choices, load, slack=SLACK_BYTES)

    async def _ask(
        self,
        name: str,
        runs: Sequence[range],
        names: Sequence[bytes],
        lease: bool,
        timeout_s: float,
        trace: TraceContext | None,
    ) -> Answer:
        if (member := self._members.get(name)) is None:
            return Answer(name, runs, LookupResult(reachable=False))  # it has left meanwhile
        hashes = b"".join(names[place] for run in runs for place in run)
        started = time.monotonic()
        found = await member.client.lookup(hashes, lease=lease, timeout_s=timeout_s, trace=trace)
        member.took(time.monotonic() - started)
        return Answer(name, runs, found)

    def _leases(self, answers: Sequence[Answer], prefix: Prefix) -> dict[str, list[int]]:
        """Leases by instance; those over nothing of the prefix are given back."""
        needed = set(prefix.owners)
        leases: dict[str, list[int]] = {}
        for answer in answers:
            if answer.found.lease and answer.name in needed:
                leases.setdefault(answer.name, []).append(answer.found.lease)
            elif answer.found.lease:
                self._give_back(answer.name, answer.found.lease)
        return leases

    def _too_late(self, call: asyncio.Task[Answer]) -> None:
        if not call.cancelled() and call.exception() is None and (lease := call.result().found.lease):
            self._give_back(call.result().name, lease)


def _next(ranked: Sequence[str], first: str) -> str | None:
    """The first in rank besides `first`."""
    return next((name for name in ranked if name != first), None)
