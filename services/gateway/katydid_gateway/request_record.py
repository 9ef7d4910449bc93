"""What is left of a request when it has ended: metrics, spans, one log line. Never what was said."""

from __future__ import annotations

import logging

from katydid_runtime.errors import RequestAbortedError

from katydid_gateway.answer import Answer
from katydid_gateway.gateway_metrics import GatewayMetrics
from katydid_gateway.request_clock import RequestClock
from katydid_gateway.requests import Usage

__all__ = ["record_finished"]

# How an answer ends that nothing was wrong with: who leaves may have read enough.
_WELL = frozenset({"ok", "left", RequestAbortedError.reason.lower()})

logger = logging.getLogger(__name__)


def record_finished(
    metrics: GatewayMetrics, answer: Answer | None, clock: RequestClock, *, api: str, outcome: str, tenant: str
) -> None:
    """`answer` is None for a request that was refused before it had one."""
    metrics.finished.labels(api, outcome).inc()
    if answer is None:
        metrics.ended(tenant, outcome, Usage(0, 0))
        logger.info("request refused", extra={"api": api, "outcome": outcome})
        return
    usage, tokens = answer.usage, answer.tokens
    if tokens:
        metrics.settled(usage)
    else:
        # Refused, or given up before its first token: nobody knows what of its prompt was computed.
        usage = Usage(0, 0)
    metrics.ended(tenant, outcome, usage)
    clock.export(tokens, answer.trace)
    if clock.ttft_s:
        metrics.answered(clock.ttft_s, clock.tpot_s(tokens), tokens, clock.trace_id, well=outcome in _WELL)
        metrics.spent(clock.phases_s)
    if clock.span.recording:
        clock.span.set_all(
            {
                "request.outcome": outcome,
                "request.engine": clock.engine,
                "request.output_tokens": usage.completion_tokens,
                "request.cached_tokens": usage.cached.total,
                "request.resumes": answer.resumes,
            }
        )
    if not logger.isEnabledFor(logging.INFO):
        return
    logger.info(
        "request finished",
        extra={
            "api": api,
            "outcome": outcome,
            "engine": clock.engine,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached.total,
            "output_tokens": usage.completion_tokens,
            "ttft_ms": round(clock.ttft_s * 1e3, 1),
            "tpot_ms": round(clock.tpot_s(tokens) * 1e3, 2),
        },
    )
