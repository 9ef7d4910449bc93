"""What the engines of one role have to do and what they can: sums over the router's picture, in tokens and pages.

Work is counted where it stands: prompts that wait in the gateway and in the engines, prompts that come, choices that
run, pages that they hold. A queue's length says none of it where one prompt has a hundred tokens and the next 192K.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from katydid_gateway.routing.cost import DEFAULT_PREFILL_SPEED
from katydid_gateway.routing.load import EngineState

__all__ = ["RoleLoad", "role_loads"]

PROMPT_ROLES = ("both", "prefill")


@dataclass(frozen=True, slots=True)
class RoleLoad:
    """One role at one moment. `ready` engines take work, `draining` ones finish theirs and count for nothing else.

    `offered_tokens` only grows: prompt tokens that came and are in no cache. `waiting_tokens` are those of them not yet
    computed. Speeds are tokens per second of all ready engines together, 0 when not measured. `held_pages` belong to
    running choices; pages that only cache count as free.
    """

    ready: int
    draining: int = 0
    offered_tokens: float = 0.0
    waiting_tokens: float = 0.0
    prefill_speed: float = 0.0
    running: int = 0
    waiting: int = 0
    decode_speed: float = 0.0
    held_pages: int = 0
    total_pages: int = 0

    @property
    def backlog_s(self) -> float:
        """Seconds the ready engines need for the prompts that wait; infinite without an engine."""
        if not self.waiting_tokens:
            return 0.0
        return self.waiting_tokens / self.prefill_speed if self.prefill_speed else float("inf")

    @property
    def cache_pressure(self) -> float:
        """Share of pages that running choices hold."""
        return self.held_pages / self.total_pages if self.total_pages else 0.0

    def headroom_s(self, page_tokens: int) -> float:
        """Seconds until every page is held, if all tokens made now stayed; infinite while none are made."""
        free_tokens = (self.total_pages - self.held_pages) * page_tokens
        return free_tokens / self.decode_speed if self.decode_speed else float("inf")


def role_loads(engines: Iterable[EngineState], sent_tokens: int, queued_tokens: int) -> Mapping[str, RoleLoad]:
    """Loads of the roles that engines have. `sent_tokens` were sent to engines since the start, `queued_tokens` wait in
    the gateway for one; both belong to the role that takes prompts."""
    groups: dict[str, list[EngineState]] = {}
    for engine in engines:
        groups.setdefault(engine.role, []).append(engine)
    taking = next((role for role in PROMPT_ROLES if role in groups), None)
    loads = {}
    for role, members in groups.items():
        own = role == taking
        loads[role] = _load(members, sent_tokens + queued_tokens if own else 0, queued_tokens if own else 0)
    return loads


def _load(engines: list[EngineState], offered_tokens: int, queued_tokens: int) -> RoleLoad:
    ready = [engine for engine in engines if engine.well and not engine.draining]
    ranks = [rank for engine in ready for rank in engine.ranks]
    reports = [rank.report for rank in ranks]
    return RoleLoad(
        ready=len(ready),
        draining=sum(engine.draining for engine in engines),
        offered_tokens=offered_tokens,
        waiting_tokens=queued_tokens + sum(rank.queued_tokens for rank in ranks),
        prefill_speed=sum(report.prefill_speed or DEFAULT_PREFILL_SPEED for report in reports),
        running=sum(report.running for report in reports),
        waiting=sum(report.waiting for report in reports),
        decode_speed=sum(report.decode_speed for report in reports),
        held_pages=sum(report.total_pages - report.free_pages for report in reports),
        total_pages=sum(report.total_pages for report in reports),
    )
