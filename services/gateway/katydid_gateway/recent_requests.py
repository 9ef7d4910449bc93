"""The last requests that ended: when, where, how long each phase took. Never what was said.

For the console, which draws them without a tracing backend. Each tenant sees its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from katydid_gateway.request_clock import RequestClock
from katydid_gateway.requests import Usage

__all__ = ["RecentRequest", "RecentRequests", "Stretch", "stretches"]

MOST = 256

# The phases of request_clock.py in the order in which they happen.
_ORDER = (
    *("receive", "tokenise", "prepare", "route", "admission", "retry", "transport"),
    *("queue", "lookup", "fetch", "prefill", "handover", "deliver", "rest"),
)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A bar of a request's waterfall: begins so many seconds after receipt; `tier` is a fetch's."""

    name: str
    begin_s: float
    length_s: float
    tier: str = ""


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """One request that has ended."""

    request_id: str
    api: str
    outcome: str
    received_ns: int
    engine: str
    trace_id: str
    usage: Usage
    ttft_s: float
    tpot_s: float
    phases_s: Mapping[str, float]
    fetches_s: Sequence[tuple[str, float]] = ()
    decode_s: float = 0.0

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """Its time, piece by piece."""
        return stretches(self.phases_s, self.fetches_s, self.ttft_s, self.decode_s)


def stretches(
    phases_s: Mapping[str, float], fetches_s: Sequence[tuple[str, float]], ttft_s: float, decode_s: float
) -> tuple[Stretch, ...]:
    """The phases up to the first token one behind the other, as they add up to the TTFT, and decoding after it.

    `fetches_s` are (tier, seconds) that together make the phase `fetch`; phases of no length are left out.
    """
    bars: list[Stretch] = []
    at = 0.0
    unknown = sorted(phases_s.keys() - set(_ORDER))
    for name in (*_ORDER, *unknown):
        parts = fetches_s if name == "fetch" and fetches_s else [("", phases_s.get(name, 0.0))]
        for tier, seconds in parts:
            if seconds > 0:
                bars.append(Stretch(name, at, seconds, tier))
                at += seconds
    if decode_s > 0:
        bars.append(Stretch("decode", ttft_s, decode_s))
    return tuple(bars)


class RecentRequests:
    """At most `MOST` requests, the newest last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], RecentRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def finished(
        self, tenant: str, request_id: str, clock: RequestClock, usage: Usage, tokens: int, *, api: str, outcome: str
    ) -> None:
        """Keep what `clock` measured of a request that delivered `tokens` tokens in its longest choice."""
        times = (clock.ttft_s, clock.tpot_s(tokens), clock.phases_s, clock.fetches_s, clock.decode_s)
        self.add(
            tenant,
            RecentRequest(request_id, api, outcome, clock.received_ns, clock.engine, clock.trace_id, usage, *times),
        )

    def add(self, tenant: str, request: RecentRequest) -> None:
        """Keep a request; one with the same id by the same tenant is forgotten, and so are the oldest."""
        self._kept.pop((tenant, request.request_id), None)
        self._kept[tenant, request.request_id] = request
        if len(self._kept) > MOST:
            self._kept.popitem(last=False)

    def get(self, tenant: str, request_id: str) -> RecentRequest | None:
        """A tenant's request, if it is still known."""
        return self._kept.get((tenant, request_id))

    def of(self, tenant: str, most: int) -> list[RecentRequest]:
        """A tenant's requests, the newest first."""
        found: list[RecentRequest] = []
        for (owner, _), request in reversed(self._kept.items()):
            if owner == tenant:
                found.append(request)
                if len(found) == most:
                    break
        return found
