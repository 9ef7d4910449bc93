"""What is known of an engine's load: its own reports, corrected by what was sent since the last one.

Reports lag behind; without the correction a burst that arrives between two reports would all go to one rank. And they
count tokens: where requests wait for others to end, or an engine is stopped now and then, first tokens that do not come
tell more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

from katydid_gateway.routing.breaker import Breaker

__all__ = ["EngineState", "RankReport", "RankState"]

# A request sent longer ago than this is in the report that arrives now.
REPORT_LAG_S = 0.05
# A first token may take twice what was predicted and a second more; what comes later is late.
_LATE_TIMES, _LATE_S = 2.0, 1.0


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank says of itself; speeds are tokens per second, 0 when not yet measured. Routing uses the first four,
    scaling all."""

    running: int = 0
    waiting: int = 0
    uncached_tokens: int = 0
    prefill_speed: float = 0.0
    decode_speed: float = 0.0
    free_pages: int = 0
    total_pages: int = 0


@dataclass(slots=True)
class RankState:
    """A rank's report and the requests it can't know of yet, by request number: (uncached tokens, time sent).

    `own` are requests of this gateway that have not ended, which it counts itself: a report that comes late must not
    make a rank look idle. `others` is what the last report had beyond them. `due` says by when the first tokens that it
    owes should be there, in the order of sending.
    """

    report: RankReport = RankReport()
    unreported: dict[int, tuple[int, float]] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)
    others: int = 0
    due: dict[int, float] = field(default_factory=dict)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens to be computed before a new request's own."""
        return self.report.uncached_tokens + sum(tokens for tokens, _ in self.unreported.values())

    @property
    def requests(self) -> int:
        """Requests it has, running or waiting."""
        return self.others + len(self.own | self.unreported.keys())

    def late_s(self, now: float) -> float:
        """For how long the first token that should have come first has been owed."""
        return max(0.0, now - min(self.due.values(), default=now))

    def sent(self, request: int, uncached_tokens: int, now: float, expected_s: float | None = None) -> None:
        """The request goes to the rank; its first token is expected after so long, None where others go before it."""
        self.unreported[request] = (uncached_tokens, now)
        if expected_s is not None:
            self.due[request] = now + _LATE_TIMES * expected_s + _LATE_S

    def settled(self, request: int) -> None:
        """The request has its first token: reports speak for it from now on. Those sent before it that still wait were
        overtaken, by the engine's own order or for want of pages: that tells of them and not of the rank."""
        self.unreported.pop(request, None)
        if request in self.due:
            for earlier in list(takewhile(lambda other: other != request, self.due)):
                del self.due[earlier]
            del self.due[request]

    def ended(self, request: int) -> None:
        """The rank has nothing of the request any more."""
        self.unreported.pop(request, None)
        self.due.pop(request, None)
        self.own.discard(request)

    def reported(self, report: RankReport, now: float) -> None:
        self.report = report
        known = [request for request, (_, sent) in self.unreported.items() if now - sent > REPORT_LAG_S]
        for request in known:
            del self.unreported[request]
        self.others = max(0, report.running + report.waiting - len(self.own - self.unreported.keys()))


@dataclass(slots=True)
class EngineState:
    """One engine as the router sees it; `excluded` says why it can't be chosen, "" when it can.

    `well` is whether it works at all, whatever it may be chosen for; `role` is both, prefill or decode.
    """

    name: str
    ranks: list[RankState] = field(default_factory=list)
    block_bytes: int = 0
    kv_cache_attached: bool = False
    excluded: str = "not connected"
    well: bool = False
    draining: bool = False
    role: str = "both"
    near: str = ""
    """The cache service's instance on its own host, "" when there is none or it is not known."""
    since: float = 0.0
    """When it joined the fleet with empty caches."""
    breaker: Breaker = field(default_factory=Breaker)

    def reported(self, reports: Mapping[int, RankReport], now: float) -> None:
        for rank, report in reports.items():
            if rank < len(self.ranks):
                self.ranks[rank].reported(report, now)
