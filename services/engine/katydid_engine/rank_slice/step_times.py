"""How long a step takes, from steps that were measured: what a replay in simulated time goes by.

A step's time is that of its rows through everything but attention, of the pairs of prompt tokens with what they attend
to, and of the K and V that its decodes read. Rows are looked up between measured points; the other two are slopes.
Chunks of prompts that are computed sparsely have rows and a slope of their own, of the pairs that they keep.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from katydid_engine.plan import StepPlan
from katydid_engine.sparse_prefill import SparsePrefill

__all__ = ["BEHIND", "MeasuredSteps", "StepTimes", "fit_step_times"]

# The last blocks of a sparse prompt attend to everything.
BEHIND = 16_384

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """Seconds of steps of one kind each.

    Attributes:
        decodes: of (sequences, tokens behind each).
        chunks: of (prompt tokens, tokens behind them).
        sparse: likewise of prompts that are computed sparsely, which go on for ``BEHIND`` tokens.
    """

    decodes: dict[tuple[int, int], float]
    chunks: dict[tuple[int, int], float]
    sparse: dict[tuple[int, int], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds.

    Attributes:
        decode_rows: of steps of decodes alone, by rows, with nothing behind them.
        rows: likewise of steps with prompts.
        pair_s: of a prompt token and a token that it attends to.
        read_s: of a token behind a decode.
        sparse_rows, sparse_pair_s: as ``rows`` and ``pair_s``, of prompts that are computed sparsely.
        sending: of the links, by rows; added where transfers are to count.
    """

    decode_rows: Points
    rows: Points
    pair_s: float
    read_s: float
    sparse_rows: Points = ()
    sparse_pair_s: float = 0.0
    sending: Points = ()

    def of(self, plan: StepPlan) -> float:
        """Of a plan without drafts."""
        rows = plan.num_decodes + plan.num_prefill_tokens
        kind, pair_s, pairs = self.decode_rows, self.pair_s, float(plan.num_prefill_pairs)
        if plan.sparse:
            kind, pair_s, pairs = self.sparse_rows, self.sparse_pair_s, plan.sparse_pairs
        elif pairs:
            kind = self.rows
        seconds = between(kind, rows) + pair_s * pairs
        seconds += self.read_s * sum(run.start + 1 for run in plan.runs[: plan.num_decodes])
        return seconds + (between(self.sending, rows) if self.sending else 0.0)


def fit_step_times(measured: MeasuredSteps, sparse: SparsePrefill | None = None) -> StepTimes:
    """Slopes by least squares over the differences between contexts of equal rows, then the rows without them.

    Args:
        sparse: how the sparse ones were computed.

    Raises:
        ValueError: no number of rows was measured at two contexts, of either kind.
    """
    read_s = _slope({(n, n * context): s for (n, context), s in measured.decodes.items()}, "decodes")
    decode_rows = _without([(n, n * context, s) for (n, context), s in measured.decodes.items()], read_s)
    dense = {(n, n * (context + (n + 1) / 2)): s for (n, context), s in measured.chunks.items()}
    rows, pair_s = _prompts(dense, "chunks")
    sparse_rows: Points = ()
    sparse_pair_s = 0.0
    if measured.sparse:
        options = sparse or SparsePrefill()
        kept = {(n, options.pairs(c, n, c + n + BEHIND)): s for (n, c), s in measured.sparse.items()}
        sparse_rows, sparse_pair_s = _prompts(kept, "sparse")
    return StepTimes(decode_rows, rows, pair_s, read_s, sparse_rows, sparse_pair_s)


def _prompts(seconds: Mapping[tuple[int, float], float], kind: str) -> tuple[Points, float]:
    """Seconds by rows, and of a pair; of steps of so many rows and pairs."""
    pair_s = _slope(seconds, kind)
    return _without([(n, work, s) for (n, work), s in seconds.items()], pair_s), pair_s


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


def _slope(seconds: Mapping[tuple[int, float], float], kind: str) -> float:
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


def _without(entries: Sequence[tuple[int, float, float]], slope: float) -> Points:
    """Mean seconds by rows, less what their work takes."""
    points = []
    for rows in sorted({rows for rows, _, _ in entries}):
        left = [max(1e-6, s - slope * work) for n, work, s in entries if n == rows]
        points.append((rows, sum(left) / len(left)))
    return points
