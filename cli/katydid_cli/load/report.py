"""From outcomes to the figures that decide: percentiles of TTFT, TPOT, ITL and end-to-end time, throughput, goodput.

Goodput counts requests that met both targets; a failed request met neither. Percentiles interpolate linearly between
ranks, as numpy does by default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from katydid_cli.load.runner import Outcome

__all__ = ["PERCENTILES", "Distribution", "Report", "Targets", "percentile", "summarize"]

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Targets:
    """The service-level targets, in seconds."""

    ttft_s: float = 4.0
    tpot_s: float = 0.05


@dataclass(frozen=True, slots=True)
class Distribution:
    """Count, mean, percentiles and extremes of a figure in seconds; all None when nothing was measured."""

    count: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    largest: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution:
        if not values:
            return cls(0, None, None, None, None, None, None)
        ordered = sorted(values)
        p50, p90, p95, p99 = (percentile(ordered, q) for q in PERCENTILES)
        return cls(len(ordered), sum(ordered) / len(ordered), p50, p90, p95, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Report:
    """What a run came to. Rates are per second of `duration_s`, from the first due request to the last answer."""

    requests: int
    completed: int
    errors: dict[str, int]
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens: int
    output_tokens: int
    cached_share: float
    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2e: Distribution
    goodput_share: float
    goodput_per_s: float
    by_engine: dict[str, int]
    latest_send_s: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> Table:
        """Milliseconds, a row a figure."""
        table = Table("", "n", "mean", *(f"p{q}" for q in PERCENTILES), "max", box=None, title_justify="left")
        for name in ("ttft", "tpot", "itl", "e2e"):
            row: Distribution = getattr(self, name)
            figures = (row.mean, row.p50, row.p90, row.p95, row.p99, row.largest)
            table.add_row(
                f"{name.upper()} ms", str(row.count), *("-" if f is None else f"{f * 1e3:.1f}" for f in figures)
            )
        return table

    def lines(self, targets: Targets) -> list[str]:
        failed = ", ".join(f"{count} {reason}" for reason, count in sorted(self.errors.items())) or "none"
        engines = ", ".join(f"{name} {count}" for name, count in sorted(self.by_engine.items()))
        return [
            f"{self.completed} of {self.requests} requests in {self.duration_s:.1f} s, failed: {failed}",
            f"{self.requests_per_s:.2f} requests/s, {self.output_tokens_per_s:.1f} output tokens/s",
            f"{self.input_tokens} prompt tokens, {self.cached_share:.1%} cached; {self.output_tokens} output tokens",
            f"goodput {self.goodput_share:.1%}, {self.goodput_per_s:.2f} requests/s"
            f" (TTFT <= {targets.ttft_s:g} s and TPOT <= {targets.tpot_s * 1e3:g} ms)",
            f"by engine: {engines or '-'}; sent at most {self.latest_send_s * 1e3:.0f} ms late",
        ]


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile of ascending values, at least one."""
    rank = (len(ordered) - 1) * q / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def summarize(outcomes: Sequence[Outcome], targets: Targets) -> Report:
    """The report of a run's outcomes; of an empty run everything is zero."""
    good = [outcome for outcome in outcomes if not outcome.error]
    met = [outcome for outcome in good if _meets(outcome, targets)]
    duration_s = max((outcome.due_s + outcome.end_s for outcome in outcomes), default=0.0) - min(
        (outcome.due_s for outcome in outcomes), default=0.0
    )
    input_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    return Report(
        requests=len(outcomes),
        completed=len(good),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error)),
        duration_s=duration_s,
        requests_per_s=_rate(len(good), duration_s),
        output_tokens_per_s=_rate(output_tokens, duration_s),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_share=sum(outcome.cached_tokens for outcome in good) / input_tokens if input_tokens else 0.0,
        ttft=Distribution.of([outcome.ttft_s for outcome in good if outcome.ttft_s is not None]),
        tpot=Distribution.of([outcome.tpot_s for outcome in good if outcome.tpot_s is not None]),
        itl=Distribution.of([gap for outcome in good for gap in outcome.gaps_s]),
        e2e=Distribution.of([outcome.end_s for outcome in good]),
        goodput_share=len(met) / len(outcomes) if outcomes else 0.0,
        goodput_per_s=_rate(len(met), duration_s),
        by_engine=dict(Counter(outcome.engine for outcome in good if outcome.engine)),
        latest_send_s=max((outcome.late_s for outcome in outcomes), default=0.0),
    )


def _meets(outcome: Outcome, targets: Targets) -> bool:
    """A single token has no TPOT to miss."""
    return (
        outcome.ttft_s is not None
        and outcome.ttft_s <= targets.ttft_s
        and (outcome.tpot_s is None or outcome.tpot_s <= targets.tpot_s)
    )


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
