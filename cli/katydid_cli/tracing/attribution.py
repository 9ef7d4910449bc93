"""What the time to first token went into: the phases the gateway measured, joined with the spans that took them.

The gateway writes `ttft.<phase>_ms` on the `ttft` span; each phase was measured where it happened, as a duration, so no
clocks of two hosts are compared. What the phases leave unexplained is `rest`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from katydid_runtime.errors import NotFoundError

from katydid_cli.tracing.spans import Span

__all__ = ["Attribution", "attribute", "find_span"]

_ORDER = (
    "receive",
    "tokenise",
    "prepare",
    "route",
    "admission",
    "retry",
    "queue",
    "lookup",
    "fetch",
    "prefill",
    "handover",
    "transport",
    "deliver",
    "rest",
)


@dataclass(frozen=True, slots=True)
class Attribution:
    """`phases_s` in the order in which they happen; they add up to `ttft_s`. `waited_for` are the linked spans."""

    ttft_s: float
    tpot_s: float | None
    phases_s: dict[str, float]
    waited_for: tuple[Span, ...]


def attribute(spans: Iterable[Span]) -> Attribution:
    """The attribution of one trace's request. Raises NotFoundError without a `ttft` span: nothing was delivered."""
    spans = list(spans)
    ttft = find_span(spans, "ttft")
    if ttft is None:
        raise NotFoundError("the trace has no ttft span: the request delivered no token, or another process traced it")
    given = {
        key.removeprefix("ttft.").removesuffix("_ms"): float(value) / 1e3
        for key, value in ttft.attributes.items()
        if key.startswith("ttft.") and key.endswith("_ms")
    }
    rest_s = ttft.duration_s - sum(value for name, value in given.items() if name != "rest")
    known = given | {"rest": rest_s}
    phases_s = {name: known[name] for name in (*_ORDER, *sorted(known.keys() - set(_ORDER))) if name in known}
    tpot = find_span(spans, "tpot")
    tpot_ms = tpot.attributes.get("tpot_ms") if tpot is not None else None
    return Attribution(
        ttft_s=ttft.duration_s,
        tpot_s=float(tpot_ms) / 1e3 if tpot_ms is not None else None,
        phases_s=phases_s,
        waited_for=tuple(span for span in spans if span.span_id in ttft.links),
    )


def find_span(spans: Iterable[Span], name: str) -> Span | None:
    """The first span called `name`, by start."""
    return min((span for span in spans if span.name == name), key=lambda span: span.start_ns, default=None)
