"""A slice as what a replay runs on, in real time; and its steps measured one kind at a time."""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from katydid_engine.plan import Run, SampleRow, Start, StepOutput, StepPlan
from katydid_engine.rank_slice.step_times import BEHIND, MeasuredSteps
from katydid_engine.rank_slice.steps import Decoding, SliceSteps
from katydid_engine.request import Request, Sampling, pages_for

__all__ = ["OnSlice", "measure_chunk", "measure_steps"]

_SKIPPED = 2


class OnSlice:
    """Launches a step while the one before it runs, as the step loop does. Ends of sequences that began elsewhere are
    nothing to it."""

    ahead = 1

    def __init__(self, steps: SliceSteps) -> None:
        self._steps = steps
        self._begun: set[int] = set()

    def begin(self, plan: StepPlan) -> Callable[[], tuple[StepOutput, float]]:
        began = time.perf_counter()
        plan = replace(plan, ends=tuple(self._begun.intersection(plan.ends)))
        self._begun.difference_update(plan.ends)
        self._begun.update(start.sequence for start in plan.starts)
        self._steps.slice.model.exchange_rows(plan.num_decodes * plan.decode_q_len + plan.num_prefill_tokens)
        launched = self._steps.runner.launch(plan)

        def end() -> tuple[StepOutput, float]:
            output = launched.output()
            return output, output.seconds(time.perf_counter() - began)

        return end

    def expect(self, request: Request) -> None:
        if request.sparse_prefill:
            self._steps.slice.model.expect(len(request.prompt))

    def close(self) -> None:
        """Ends what is open, for another to take its place."""
        self._steps.runner.run(StepPlan(0, ends=tuple(self._begun)))
        self._begun.clear()


def measure_steps(
    steps: SliceSteps,
    decodes: Sequence[tuple[int, int]],
    chunks: Sequence[tuple[int, int]],
    sparse: Sequence[tuple[int, int]] = (),
    *,
    repeats: int = 5,
) -> MeasuredSteps:
    """Medians of steps of so many (sequences, tokens behind each), and of (prompt tokens, tokens behind them), the
    latter also ``sparse``: of ``repeats``, and of decodes twice as many."""
    found = MeasuredSteps({}, {})
    for batch, context in decodes:
        found.decodes[batch, context] = statistics.median(Decoding(steps, batch, context).time(2 * repeats, _SKIPPED))
    for tokens, context in chunks:
        found.chunks[tokens, context] = measure_chunk(steps, tokens, context, repeats)
    for tokens, context in sparse:
        found.sparse[tokens, context] = measure_chunk(steps, tokens, context, repeats, sparse=True)
    return found


def measure_chunk(steps: SliceSteps, tokens: int, context: int, repeats: int, *, sparse: bool = False) -> float:
    """Seconds of a step that computes ``tokens`` of a prompt behind ``context`` that are there, beside one decode.
    A ``sparse`` one is in the middle of its prompt."""
    stream, prompt = steps.next_sequence(), steps.next_sequence()
    ids = array("I", steps.slice.token_ids(tokens + 1))
    first, *more = range(pages_for(context + tokens) + 1)
    tables = (array("I", [first]), array("I", more))
    length = context + tokens + (BEHIND if sparse else 1)
    starts = (
        Start(stream, Sampling(ignore_eos=True), 1, ids),
        Start(prompt, Sampling(ignore_eos=True), length, ids, sparse_prefill=sparse),
    )
    runs = (Run(stream, 0, ids[:1], 0, tables[0]), Run(prompt, context, ids[1:], 0, tables[1]))
    steps.slice.model.exchange_rows(tokens + 1)
    seconds = []
    for index in range(_SKIPPED + repeats):
        plan = StepPlan(
            0, starts=starts if index == 0 else (), runs=runs, num_decodes=1, samples=(SampleRow(0, 0),), drafts=0
        )
        steps.synchronize()
        began = time.perf_counter()
        steps.runner.run(plan)
        steps.synchronize()
        seconds.append(time.perf_counter() - began)
    steps.runner.run(StepPlan(0, ends=(stream, prompt)))
    return statistics.median(seconds[_SKIPPED:])
