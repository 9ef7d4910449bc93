"""What a rank does before it is ready: the largest step, the graphs of its decodes; and what they take of a GPU.

Graphs hold the addresses of pages, and the number of pages depends on what graphs take. So the largest step is run and
the largest bucket captured once with a page or two, measured, and given up, before pages are counted.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from katydid_engine.chunk_steps import ChunkSteps
from katydid_engine.collectives import Collectives
from katydid_engine.decode_steps import Captured, DecodeSteps
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.runner import Runner

__all__ = ["WarmUp"]


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The largest a rank's steps can be.

    Attributes:
        batch_tokens: of a step.
        sequences: of a step.
        tokens: of a sequence.
        depths: numbers of drafts that steps verify and make; the largest is 0 without a draft layer.
        capture: whether decodes become CUDA graphs.
        chunks: whether chunks of prompts beside them do.
    """

    batch_tokens: int
    sequences: int
    tokens: int
    depths: Sequence[int]
    capture: bool
    chunks: bool = True

    def run(self, runner: Runner) -> None:
        """So that no request pays for first use, nor finds too little memory."""
        self._largest(runner)
        if self.capture:
            pieces = Captured()
            self._steps(runner, pieces).prepare()
            if self.chunks:
                self._chunk_steps(runner, pieces).prepare()

    def measure(self, model: DecoderLM, collectives: Collectives) -> int:
        """Bytes of the GPU that steps and graphs will take beside what is taken when this returns."""
        runner = Runner(model, 2, collectives=collectives, drafts=max(self.depths) > 0, ahead=True)
        self._largest(runner)
        more = 0
        if self.capture:
            pieces = Captured()
            steps = self._steps(runner, pieces)
            chunk_steps = self._chunk_steps(runner, pieces) if self.chunks else None
            first, *others = steps.buckets
            steps.prepare([first])
            count = len(others) - 1
            if chunk_steps is not None:
                chunk_steps.prepare(chunk_steps.buckets[:1])
                count += len(chunk_steps.buckets) - 1
            taken = _used(model.device)
            steps.prepare(others[:1])
            # They share what they compute in; each has its own list of launches.
            more = max(0, _used(model.device) - taken) * max(0, count)
            del pieces, steps, chunk_steps
        most = _used(model.device) + more
        del runner
        gc.collect()
        torch.cuda.empty_cache()
        return most - _used(model.device)

    def _largest(self, runner: Runner) -> None:
        runner.warm_up(min(self.batch_tokens, self.tokens), self.sequences, self.tokens, max(self.depths))

    def _steps(self, runner: Runner, pieces: Captured) -> DecodeSteps:
        return runner.use_decode_steps(pieces, rows=self.sequences, tokens=self.tokens, depths=self.depths)

    def _chunk_steps(self, runner: Runner, pieces: Captured) -> ChunkSteps:
        return runner.use_chunk_steps(pieces, rows=self.sequences, tokens=self.tokens, depths=self.depths)


def _used(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free
