"""Runs prompts and decode steps of a slice through the engine's runner, and times them."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from katydid_engine.chunk_steps import ALONE_CHUNKS, SPARSE_CHUNKS
from katydid_engine.decode_steps import Captured
from katydid_engine.forward_batch import PAGE_SIZE
from katydid_engine.plan import Run, SampleRow, Start, StepPlan
from katydid_engine.rank_slice.build import RankSlice, fill_pages
from katydid_engine.request import Sampling, pages_for
from katydid_engine.runner import Runner
from katydid_engine.slot_memory import SlotMemory
from katydid_engine.step_outcome import Launched

__all__ = ["Decoding", "SliceSteps"]

_NO_PAGES = array("I")
_UNKNOWN = array("I", (0,))


class SliceSteps:
    """A runner with pages for ``tokens`` tokens; sequences get numbers and pages of their own from here.

    Args:
        drafts: most that a decode step makes and verifies; the slice must have a draft layer then.
        ahead: whether a step is launched before the one before it is over; by default on the first rank of a TP group.
        arena: whether plans move blocks between pages and slots of an arena of this process.

    Attributes:
        drafts: made and verified in every decode step that begins from now on.
    """

    def __init__(
        self, rank_slice: RankSlice, tokens: int, *, drafts: int = 0, ahead: bool | None = None, arena: bool = False
    ) -> None:
        self.slice = rank_slice
        self.drafts = drafts
        self.pages = pages_for(tokens)
        # Only the first rank of a TP group samples; the others would go on from tokens that nobody told them.
        self.ahead = rank_slice.tensor.rank == 0 if ahead is None else ahead
        slots = None
        if arena:
            staging = torch.zeros((1, self.object_bytes), dtype=torch.uint8)
            # With its number: a thread of its own registers the memory.
            device = torch.empty(0, device=rank_slice.model.device).device
            slots = SlotMemory(staging, device, face=os.getpid())
        self.runner = Runner(
            rank_slice.model,
            self.pages,
            collectives=rank_slice.tensor,
            slots=slots,
            drafts=drafts > 0,
            ahead=self.ahead,
        )
        fill_pages(self.runner.kv_cache)
        self._sequence = 0

    @property
    def object_bytes(self) -> int:
        """Of a block with the heads of all ranks."""
        model, plan = self.slice.model, self.slice.options.plan
        page = model.new_kv_cache(1).bytes_per_page
        return page * min(plan.tp, model.config.num_kv_heads)

    def capture(
        self,
        rows: int,
        tokens: int,
        *,
        agreement: float | None = None,
        chunks: bool = False,
        depths: Iterable[int] | None = None,
    ) -> int:
        """Decode steps of up to ``rows`` sequences of up to ``tokens`` tokens are graphs from now on; ``agreement`` is
        the share of drafts that count as right, for these weights predict nothing; with ``chunks`` also passes with a
        chunk of a prompt beside the decodes; ``depths``: numbers of drafts, by default none and ``drafts``. How many
        graphs."""
        pieces, depths = Captured(), {0, self.drafts} if depths is None else set(depths)
        steps = self.runner.use_decode_steps(pieces, rows=rows, tokens=tokens, depths=depths, agreement=agreement)
        steps.prepare()
        if chunks:
            self.runner.use_chunk_steps(pieces, rows=rows, tokens=tokens, depths=depths, alone=ALONE_CHUNKS).prepare()
        if chunks and self.slice.model.sparse_prefill is not None:
            self.runner.use_chunk_steps(
                pieces, rows=rows, tokens=tokens, depths=depths, chunks=SPARSE_CHUNKS, sparse=True
            ).prepare()
        return len(pieces)

    def capture_batches(
        self, batches: Sequence[int], tokens: int, depths: Sequence[int], agreement: float | None = None
    ) -> None:
        """As ``capture``, of steps of so many sequences with so many drafts alone."""
        widths = {0, *depths}
        steps = self.runner.use_decode_steps(
            Captured(), rows=max(batches), tokens=tokens, depths=widths, agreement=agreement
        )
        found = {steps.bucket(batch, 1 + depth) for batch in batches for depth in widths}
        steps.prepare(sorted((bucket for bucket in found if bucket), key=lambda bucket: -bucket.tokens))

    def prefill(self, tokens: int, chunk: int, *, sparse: bool = False) -> float:
        """Seconds from an empty sequence to the token that follows its prompt, computed ``chunk`` tokens at a time."""
        ids = array("I", self.slice.token_ids(tokens))
        sequence = self.next_sequence()
        pages = array("I", range(pages_for(tokens)))
        starts = (Start(sequence, Sampling(ignore_eos=True), tokens, ids, sparse_prefill=sparse),)
        self.slice.model.exchange_rows(min(tokens, chunk))
        self.synchronize()
        started = time.perf_counter()
        for first in range(0, tokens, chunk):
            last = min(first + chunk, tokens)
            begin, end = -(-first // PAGE_SIZE), -(-last // PAGE_SIZE)
            run = Run(sequence, first, ids[first:last], begin, pages[begin:end])
            samples = (SampleRow(0, 0),) if last == tokens else ()
            plan = StepPlan(0, starts=starts if first == 0 else (), runs=(run,), samples=samples)
            launched = self.runner.launch(plan)
        launched.output()
        self.synchronize()
        seconds = time.perf_counter() - started
        self.runner.run(StepPlan(0, ends=(sequence,)))
        return seconds

    def synchronize(self) -> None:
        if self.slice.model.device.type == "cuda":
            torch.cuda.synchronize(self.slice.model.device)

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence


class Decoding:
    """``batch`` sequences with ``context`` tokens behind them, which decode step by step; each has pages of its own.

    As in the step loop a step is launched before what the last one sampled is read.

    Raises:
        ValueError: there are too few pages.
    """

    def __init__(self, steps: SliceSteps, batch: int, context: int) -> None:
        each = steps.pages // batch
        if each * PAGE_SIZE <= context:
            raise ValueError(f"{batch} sequences of {context} tokens: there are {steps.pages} pages of {PAGE_SIZE}")
        self._steps = steps
        # Of contexts that prompts of random tokens left, all rows would come to choose the same experts.
        fill_pages(steps.runner.kv_cache)
        self._sequences = [steps.next_sequence() for _ in range(batch)]
        self._ids = steps.slice.token_ids(batch, seed=1)
        self._known = [context] * batch
        self._pages = each
        prompt = array("I", steps.slice.token_ids(1))
        # Greedy rows come to say the same, and would choose the same experts.
        sampling = Sampling(ignore_eos=True, temperature=1.0)
        starts = tuple(
            Start(sequence, replace(sampling, seed=sequence), context, prompt) for sequence in self._sequences
        )
        runs = tuple(
            Run(sequence, context - 1, array("I", [token]), 0, array("I", range(row * each, (row + 1) * each)))
            for row, (sequence, token) in enumerate(zip(self._sequences, self._ids, strict=True))
        )
        steps.slice.model.exchange_rows(batch * (1 + steps.drafts))
        self._width = 1
        self._under_way = self._launch(runs, starts)

    def step(self) -> None:
        """Launches the next step, then waits for the one before it."""
        before, width = self._under_way, self._width
        ahead = self._steps.ahead
        runs = tuple(
            Run(
                sequence,
                known + width - 1,
                _UNKNOWN if ahead else array("I", [token]),
                self._pages,
                _NO_PAGES,
                ahead=ahead,
            )
            for sequence, known, token in zip(self._sequences, self._known, self._ids, strict=True)
        )
        self._width = 1 + self._steps.drafts
        self._under_way = self._launch(runs)
        self._take(before, width)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    @property
    def tokens(self) -> int:
        """Of all sequences, as far as the host knows."""
        return sum(self._known)

    def time(self, steps: int, skip: int) -> list[float]:
        """Seconds of each of ``steps`` after the first ``skip``; the sequences end then."""
        self.run(skip)
        seconds = []
        for _ in range(steps):
            started = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - started)
        self.end()
        return seconds

    def end(self) -> None:
        self._take(self._under_way, self._width)
        self._steps.runner.run(StepPlan(0, ends=tuple(self._sequences)))

    def _launch(self, runs: tuple[Run, ...], starts: tuple[Start, ...] = ()) -> Launched:
        samples = tuple(SampleRow(row, 0) for row in range(len(runs)))
        return self._steps.runner.launch(
            StepPlan(
                0,
                starts=starts,
                runs=runs,
                num_decodes=len(runs),
                decode_q_len=self._width,
                samples=samples,
                drafts=self._steps.drafts,
            )
        )

    def _take(self, launched: Launched, width: int) -> None:
        """Sequences grow by what was accepted; of a rank that does not sample by all."""
        tokens = launched.output().tokens
        for row, known in enumerate(self._known):
            self._known[row] = known + (len(tokens[row]) if tokens else width)
