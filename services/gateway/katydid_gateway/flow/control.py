"""Whether a request is taken, and when it goes: its tenant's budget, the time to first token it can have, the gate."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from katydid_runtime.errors import OverloadedError, QuotaExceededError

from katydid_gateway.flow.budgets import Budgets, Reservation, TenantTerms
from katydid_gateway.flow.fair_queue import PriorityClass, Ticket, class_of
from katydid_gateway.flow.gate import Gate
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.routing.cost import DEFAULT_PREFILL_SPEED, Prediction
from katydid_gateway.routing.router import Router

__all__ = ["Admission", "FlowControl"]


@dataclass(eq=False, slots=True)
class Admission:
    """A request that was taken, until it is settled."""

    ticket: Ticket
    reservation: Reservation


class FlowControl:
    """`ttft_limit_s` of 0 refuses nobody for being late; `terms` says what a tenant was given."""

    def __init__(
        self,
        router: Router,
        terms: Callable[[str], TenantTerms],
        metrics: GatewayMetrics,
        *,
        engine_queue_s: float,
        max_queued: int,
        ttft_limit_s: float,
    ) -> None:
        self._router = router
        self._terms = terms
        self._metrics = metrics
        self._engine_queue_s = engine_queue_s
        self._ttft_limit_s = ttft_limit_s
        self.budgets = Budgets(terms)
        self.gate = Gate(self._room, self._speed, max_queued)
        self._observe()

    def admit(self, tenant: str, priority: int, prediction: Prediction, timeout_s: float) -> Admission:
        """Take a request that may last `timeout_s`.

        Raises QuotaExceededError when its tenant has used up its tokens, OverloadedError when its first token would
        come after its deadline or the limit: better now than late, and its caller is told when to come again.
        """
        now = time.monotonic()
        ticket = Ticket(tenant, prediction.uncached_tokens, class_of(priority), now, self._terms(tenant).weight)
        wait_s = 0.0 if self.gate.open else self.gate.wait_s(ticket)
        # By work alone: that one first token is long owed sends others elsewhere, but where they can go they are taken.
        ttft_s = wait_s + prediction.expected_s
        limit_s = min(timeout_s, self._ttft_limit_s or timeout_s)
        # A deadline that has passed ends the request by itself.
        if ttft_s > limit_s > 0:
            self._metrics.shed.labels("late").inc()
            raise OverloadedError(
                f"the first token would come in {ttft_s:.3g} s, later than the {limit_s:.3g} s it may take",
                retry_after_s=max(1.0, ttft_s - limit_s),
            )
        reservation = self.budgets.reserve(tenant, prediction.uncached_tokens, now)
        if not isinstance(reservation, Reservation):
            self._metrics.shed.labels("quota").inc()
            raise QuotaExceededError(
                f"tenant {tenant} has used up its {self._terms(tenant).tokens_per_minute} tokens a minute",
                field="tokens_per_minute",
                value=tenant,
                retry_after_s=reservation,
            )
        return Admission(ticket, reservation)

    @asynccontextmanager
    async def turn(self, admission: Admission) -> AsyncIterator[None]:
        """Wait for the request's turn, and send it within the block. Raises OverloadedError when too many wait."""
        try:
            async with self.gate.turn(admission.ticket):
                self._observe()
                yield
        except OverloadedError:
            self._metrics.shed.labels("queue").inc()
            raise
        finally:
            self._observe()

    def settle(self, admission: Admission, used_tokens: int) -> None:
        """The request has ended; it had so many prompt tokens computed and output tokens made."""
        self.budgets.settle(admission.reservation, used_tokens, time.monotonic())

    def _observe(self) -> None:
        for level in PriorityClass:
            self._metrics.queued.labels(level.name.lower()).set(self.gate.queue.waiting(level))

    def _room(self) -> bool:
        """Whether some engine has less than `engine_queue_s` of prompts before it."""
        able = [engine for engine in self._router.engines.values() if not engine.excluded and engine.role != "decode"]
        # Without an engine nothing is gained by waiting: routing says so at once.
        return not able or any(
            rank.queued_tokens < self._engine_queue_s * (rank.report.prefill_speed or DEFAULT_PREFILL_SPEED)
            for engine in able
            for rank in engine.ranks
        )

    def _speed(self) -> float:
        return sum(
            rank.report.prefill_speed or DEFAULT_PREFILL_SPEED
            for engine in self._router.engines.values()
            if not engine.excluded and engine.role != "decode"
            for rank in engine.ranks
        )
