"""How long a step takes, from steps that were measured: what a replay in simulated time goes by.

A step's time is that of its rows through everything but attention, of the pairs of prompt tokens with what they attend
to, and of the K and V that its decodes read. Rows are looked up between measured points; the other two are slopes.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from katydid_engine.plan import StepPlan

__all__ = ["MeasuredSteps", "StepTimes", "fit_step_times"]

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Seconds of steps of one kind each.

    Attributes:
        decodes: of (sequences, tokens behind each).
        chunks: of (prompt tokens, tokens behind them).
    """

    decodes: dict[tuple[int, int], float]
    chunks: dict[tuple[int, int], float]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds.

    Attributes:
        decode_rows: of steps of decodes alone, by rows, with nothing behind them.
        rows: likewise of steps with prompts.
        pair_s: of a prompt token and a token that it attends to.
        read_s: of a token behind a decode.
        sending: of the links, by rows; added where transfers are to count.
    """

    decode_rows: Points
    rows: Points
    pair_s: float
    read_s: float
    sending: Points = ()

    def of(self, plan: StepPlan) -> float:
        """Of a plan without drafts."""
        decodes, prompts = plan.runs[: plan.num_decodes], plan.runs[plan.num_decodes :]
        rows = plan.num_decodes + plan.num_prefill_tokens
        seconds = between(self.rows if prompts else self.decode_rows, rows)
        seconds += self.read_s * sum(run.start + 1 for run in decodes)
        seconds += self.pair_s * sum(len(run.tokens) * (run.start + (len(run.tokens) + 1) / 2) for run in prompts)
        return seconds + (between(self.sending, rows) if self.sending else 0.0)


def fit_step_times(measured: MeasuredSteps) -> StepTimes:
    """Slopes by least squares over the differences between contexts of equal rows, then the rows without them.

    Raises:
        ValueError: no number of rows was measured at two contexts, of either kind.
    """
    read_s = _slope({(n, n * context): s for (n, context), s in measured.decodes.items()}, "decodes")
    pairs = {(n, n * context + n * (n + 1) // 2): s for (n, context), s in measured.chunks.items()}
    pair_s = _slope(pairs, "chunks")
    decode_rows = _without([(n, n * context, s) for (n, context), s in measured.decodes.items()], read_s)
    rows = _without([(n, work, s) for (n, work), s in pairs.items()], pair_s)
    return StepTimes(decode_rows, rows, pair_s, read_s)


def between(points: Points, x: float) -> float:
    """By powers between points, in proportion beyond the last, the first's below it."""
    places = [place for place, _ in points]
    index = bisect.bisect_left(places, x)
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1] * x / points[-1][0]
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 * math.exp(math.log(y1 / y0) * math.log(x / x0) / math.log(x1 / x0))


def _slope(seconds: dict[tuple[int, int], float], kind: str) -> float:
    """Of seconds over the second number, among entries that share the first."""
    above = below = 0.0
    for rows in {rows for rows, _ in seconds}:
        points = [(work, s) for (n, work), s in seconds.items() if n == rows]
        mean_work = sum(work for work, _ in points) / len(points)
        mean_s = sum(s for _, s in points) / len(points)
        above += sum((work - mean_work) * (s - mean_s) for work, s in points)
        below += sum((work - mean_work) ** 2 for work, _ in points)
    if not below:
        raise ValueError(f"{kind}: no number of rows was measured at two contexts")
    return max(0.0, above / below)


def _without(entries: Sequence[tuple[int, int, float]], slope: float) -> Points:
    """Mean seconds by rows, less what their work takes."""
    points = []
    for rows in sorted({rows for rows, _, _ in entries}):
        left = [max(1e-6, s - slope * work) for n, work, s in entries if n == rows]
        points.append((rows, sum(left) / len(left)))
    return points
