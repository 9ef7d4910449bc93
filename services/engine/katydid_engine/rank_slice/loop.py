"""The engine's scheduler over a slice: what planning a step ahead of the device wins, and how long the device idles."""

from __future__ import annotations

import itertools
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from katydid_runtime.block_hash import BLOCK_TOKENS, ChainKey

from katydid_engine.block_pool import BlockPool
from katydid_engine.draft_depth import DraftDepth
from katydid_engine.plan import StepOutput, StepPlan
from katydid_engine.rank_slice.build import fill_pages
from katydid_engine.rank_slice.measure import prefix
from katydid_engine.rank_slice.on_slice import OnSlice
from katydid_engine.rank_slice.phases import KernelSpan
from katydid_engine.rank_slice.steps import SliceSteps
from katydid_engine.rank_slice.timeline import record_timeline
from katydid_engine.request import Request, Sampling
from katydid_engine.scheduler import Scheduler, SchedulerConfig

__all__ = ["Loop", "idle_between_steps", "measure_loop"]

PROMPT = 256
_KEY = ChainKey(b"\0" * 32)
_MOST = 8192
_SETTLING, _PROFILED = 8, 12
# What a step begins with on the device, and what copies come before it and behind the one before.
_FIRST = "advance"
_COPIES = ("Memcpy", "Memset")


@dataclass(frozen=True, slots=True)
class Loop:
    """Of a step that the scheduler planned: seconds from one to the next, tokens a second of all sequences, and the
    median of what the device idles before a step; None without a GPU."""

    step_s: float
    tokens_per_s: float
    idle_s: float | None


def measure_loop(steps: SliceSteps, batch: int, *, count: int) -> list[dict[str, Any]]:
    """Rows of a results file: ``batch`` requests decode with ``steps.drafts`` drafts, each step planned when the one
    before it is over, and while it runs. By turns, the faster of two runs each."""
    runs: dict[int, list[Loop]] = {0: [], 1: []}
    for ahead in (0, 1, 0, 1):
        runs[ahead].append(_Running(steps, batch, ahead).measure(count))
    drafts = f", {steps.drafts} drafts" if steps.drafts else ""
    rows = []
    for ahead, how in ((0, "synchronous"), (1, "a step ahead")):
        best = max(runs[ahead], key=lambda loop: loop.tokens_per_s)
        rows.append(
            {
                "figure": f"{prefix(steps.slice)}: scheduler's loop, batch {batch}{drafts}, {how}",
                "value": best.step_s,
                "unit": "s",
                "tokens_per_s": best.tokens_per_s,
                "idle_s": best.idle_s,
                "repeats": count,
            }
        )
    return rows


def idle_between_steps(spans: Sequence[KernelSpan]) -> list[float]:
    """Seconds before each step's first kernel that nothing ran, copies' own time left out."""
    idle, waited, end = [], 0.0, spans[0].end if spans else 0.0
    for span in spans[1:]:
        waited += max(0.0, span.start - end)
        end = max(end, span.end)
        if _FIRST in span.name:
            idle.append(waited * 1e-6)
        if not span.name.startswith(_COPIES):
            waited = 0.0
    return idle


class _Running:
    """Requests that decode until they are aborted."""

    def __init__(self, steps: SliceSteps, batch: int, ahead: int) -> None:
        self._steps = steps
        self._executor = OnSlice(steps)
        self._ahead = ahead
        self._batch = batch
        self._tokens = 0
        self._under_way: deque[tuple[StepPlan, Callable[[], tuple[StepOutput, float]]]] = deque()
        room = steps.pages * BLOCK_TOKENS
        config = SchedulerConfig(max_model_tokens=room, max_batch_tokens=max(_MOST, batch), max_sequences=batch)
        self._scheduler = Scheduler(config, BlockPool(steps.pages), time.perf_counter, drafts=DraftDepth(steps.drafts))
        sampling = Sampling(max_tokens=room, ignore_eos=True, temperature=1.0)
        for handle in range(batch):
            prompt = array("I", steps.slice.token_ids(PROMPT, seed=handle))
            self._scheduler.add(Request(handle, prompt, _KEY, sampling, bypass_cache=True))

    def measure(self, count: int) -> Loop:
        while self._step().num_decodes < self._batch:
            pass
        # What their prompts left is alike, and makes them choose the same experts.
        fill_pages(self._steps.runner.kv_cache)
        for _ in range(_SETTLING):
            self._step()
        before, began = self._tokens, time.perf_counter()
        for _ in range(count):
            self._step()
        seconds = time.perf_counter() - began
        gained = self._tokens - before
        spans = record_timeline(lambda: [self._step() for _ in range(_PROFILED)])
        idle = idle_between_steps(spans)
        for handle in range(self._batch):
            self._scheduler.abort(handle)
        while self._under_way:
            self._finish()
        self._executor.close()
        return Loop(seconds / count, gained / seconds, statistics.median(idle) if idle else None)

    def _step(self) -> StepPlan:
        plan = self._scheduler.schedule()
        assert plan is not None
        self._under_way.append((plan, self._executor.begin(plan)))
        while len(self._under_way) > self._ahead:
            self._finish()
        return plan

    def _finish(self) -> None:
        plan, ended = self._under_way.popleft()
        output, seconds = ended()
        self._scheduler.commit(plan, output)
        self._scheduler.took(plan, seconds)
        decoded = itertools.compress(output.tokens, (row.run < plan.num_decodes for row in plan.samples))
        self._tokens += sum(map(len, decoded))
        self._scheduler.take_outcome()
