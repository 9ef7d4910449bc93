"""Runs prompts and decode steps of a slice through the engine's runner, and times them."""

from __future__ import annotations

import time
from array import array

import torch

from katydid_engine.forward_batch import PAGE_SIZE
from katydid_engine.plan import Run, SampleRow, Start, StepOutput, StepPlan
from katydid_engine.rank_slice.build import RankSlice, fill_pages
from katydid_engine.request import Sampling, pages_for
from katydid_engine.runner import Runner

__all__ = ["SliceSteps"]

_NO_PAGES = array("I")


class SliceSteps:
    """A runner with pages for some tokens, whose sequences have numbers of their own.

    Args:
        tokens: room for so many in whole pages of one sequence, or of several that round up.
    """

    def __init__(self, rank_slice: RankSlice, tokens: int) -> None:
        self.slice = rank_slice
        self.pages = pages_for(tokens)
        self.runner = Runner(rank_slice.model, self.pages, collectives=rank_slice.tensor)
        fill_pages(self.runner.kv_cache)
        self._sequence = 0

    def prefill(self, tokens: int, chunk: int, *, sparse: bool = False) -> float:
        """Seconds from an empty sequence to the token that follows its prompt, computed ``chunk`` tokens at a time."""
        ids = array("I", self.slice.token_ids(tokens))
        sequence = self._next()
        pages = array("I", range(pages_for(tokens)))
        starts = (Start(sequence, Sampling(ignore_eos=True), tokens, ids, sparse_prefill=sparse),)
        self.synchronize()
        started = time.perf_counter()
        for first in range(0, tokens, chunk):
            last = min(first + chunk, tokens)
            begin, end = -(-first // PAGE_SIZE), -(-last // PAGE_SIZE)
            run = Run(sequence, first, ids[first:last], begin, pages[begin:end])
            samples = (SampleRow(0, 0),) if last == tokens else ()
            self.runner.run(StepPlan(0, starts=starts if first == 0 else (), runs=(run,), samples=samples))
        self.synchronize()
        seconds = time.perf_counter() - started
        self.runner.run(StepPlan(0, ends=(sequence,)))
        return seconds

    def decode(self, batch: int, context: int, steps: int, *, skip: int = 3) -> list[float]:
        """Seconds of each of ``steps`` steps of ``batch`` sequences that have ``context`` tokens behind them."""
        return Decoding(self, batch, context).time(steps, skip)

    def synchronize(self) -> None:
        if self.slice.model.device.type == "cuda":
            torch.cuda.synchronize(self.slice.model.device)

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence


class Decoding:
    """Sequences that decode step by step; each has pages of its own."""

    def __init__(self, steps: SliceSteps, batch: int, context: int) -> None:
        self._steps = steps
        self._sequences = [steps._next() for _ in range(batch)]
        self._context = context
        each = steps.pages // batch
        if each * PAGE_SIZE <= context:
            raise ValueError(f"{batch} sequences of {context} tokens: there are {steps.pages} pages of {PAGE_SIZE}")
        prompt = array("I", steps.slice.token_ids(1))
        starts = tuple(Start(sequence, Sampling(ignore_eos=True), context, prompt) for sequence in self._sequences)
        tables = [array("I", range(row * each, (row + 1) * each)) for row in range(batch)]
        ids = steps.slice.token_ids(batch, seed=1)
        runs = tuple(
            Run(sequence, context - 1, array("I", [token]), 0, pages)
            for sequence, token, pages in zip(self._sequences, ids, tables, strict=True)
        )
        samples = tuple(SampleRow(row, 0) for row in range(batch))
        self._pages = each
        output = steps.runner.run(StepPlan(0, starts=starts, runs=runs, num_decodes=batch, samples=samples))
        self._tokens = self._sampled(output, ids)

    def step(self) -> None:
        runs = tuple(
            Run(sequence, self._context, array("I", [token]), self._pages, _NO_PAGES)
            for sequence, token in zip(self._sequences, self._tokens, strict=True)
        )
        samples = tuple(SampleRow(row, 0) for row in range(len(runs)))
        output = self._steps.runner.run(StepPlan(0, runs=runs, num_decodes=len(runs), samples=samples))
        self._tokens = self._sampled(output, self._tokens)
        self._context += 1

    def time(self, steps: int, skip: int) -> list[float]:
        """Seconds of each of ``steps`` after the first ``skip``; the sequences end then."""
        for _ in range(skip):
            self.step()
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - started)
        self.end()
        return seconds

    def end(self) -> None:
        self._steps.runner.run(StepPlan(0, ends=tuple(self._sequences)))

    def _sampled(self, output: StepOutput, before: list[int]) -> list[int]:
        """Only the first rank samples; others go on with the tokens they have."""
        return [tokens[0] for tokens in output.tokens] if output.tokens else before
