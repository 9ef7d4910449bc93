"""Looks at the router's picture every few seconds and sets the gauges that an autoscaler reads."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from katydid_runtime.block_hash import BLOCK_TOKENS

from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.routing.router import Router
from katydid_gateway.scaling.planner import Planner, ScalingPlan, ScalingTerms
from katydid_gateway.scaling.signals import RoleLoad, role_loads

__all__ = ["ScalingWatch"]

PERIOD_S = 5.0

logger = logging.getLogger(__name__)


class ScalingWatch:
    """`queued_tokens()` are those that wait in the gateway for an engine."""

    def __init__(
        self, router: Router, queued_tokens: Callable[[], int], metrics: GatewayMetrics, terms: ScalingTerms
    ) -> None:
        self._router = router
        self._queued_tokens = queued_tokens
        self._metrics = metrics
        self._terms = terms
        self._planners: dict[str, Planner] = {}
        self.plans: dict[str, ScalingPlan] = {}

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                self.look(time.monotonic())
            except Exception:
                # A defect met in one look must not leave an autoscaler with the same number for good.
                logger.exception("the scaling plan failed")
            await asyncio.sleep(PERIOD_S)

    def look(self, now: float) -> None:
        """Observe once and set the gauges; a role that no engine has any more keeps its last plan."""
        loads = role_loads(self._router.engines.values(), self._router.sent_tokens, self._queued_tokens())
        for role, load in loads.items():
            planner = self._planners.setdefault(role, Planner(self._terms))
            plan = self.plans[role] = planner.observe(load, now)
            self._show(role, load, plan)
        for role in self._planners.keys() - loads.keys():
            self._show(role, RoleLoad(ready=0), self.plans[role])

    def _show(self, role: str, load: RoleLoad, plan: ScalingPlan) -> None:
        metrics = self._metrics
        metrics.desired_replicas.labels(role).set(plan.desired)
        metrics.ready_replicas.labels(role).set(load.ready)
        metrics.draining_replicas.labels(role).set(load.draining)
        for work, engines in plan.needed.items():
            metrics.needed_replicas.labels(role, work).set(engines)
        metrics.prefill_backlog.labels(role).set(load.backlog_s)
        metrics.decode_headroom.labels(role).set(load.headroom_s(BLOCK_TOKENS))
        metrics.cache_pressure.labels(role).set(load.cache_pressure)
