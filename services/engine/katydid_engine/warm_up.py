"""What a rank does before it is ready: the largest step, the graphs of its decodes; and what they take of a GPU.

Graphs hold the addresses of pages, and the number of pages depends on what graphs take. So the largest step is run and
the largest bucket captured once with a page or two, measured, and given up, before pages are counted.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from katydid_engine.chunk_steps import ALONE_CHUNKS, CHUNKS, SPARSE_CHUNKS, ChunkSteps
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
        chunks: whether chunks of prompts beside them do, and larger ones without decodes.
        sparse: whether there are prompts that are computed sparsely.
        halved: whether the largest is computed in two parts, and does.
    """

    batch_tokens: int
    sequences: int
    tokens: int
    depths: Sequence[int]
    capture: bool
    chunks: bool = True
    sparse: bool = False
    halved: bool = False

    @property
    def chunk_sizes(self) -> dict[bool, Sequence[int]]:
        """Of chunks beside decodes that become graphs, by whether their prompts are sparse."""
        if not (self.capture and self.chunks):
            return {}
        return {False: CHUNKS, True: SPARSE_CHUNKS} if self.sparse else {False: CHUNKS}

    @property
    def alone_sizes(self) -> Sequence[int]:
        """Of larger chunks without decodes that become graphs; of prompts that are not sparse."""
        wanted = self.capture and self.chunks
        return [size for size in ALONE_CHUNKS if size <= self.batch_tokens] if wanted else []

    @property
    def halved_sizes(self) -> Sequence[int]:
        """Of chunks in two parts that become graphs."""
        wanted = self.capture and self.chunks and self.halved and self.batch_tokens > ALONE_CHUNKS[-1]
        return [self.batch_tokens] if wanted else []

    def run(self, runner: Runner) -> None:
        """So that no request pays for first use, nor finds too little memory."""
        self._largest(runner)
        if self.capture:
            pieces = Captured()
            self._steps(runner, pieces).prepare()
            for steps in self._chunk_steps(runner, pieces):
                steps.prepare()

    def measure(self, model: DecoderLM, collectives: Collectives) -> int:
        """Bytes of the GPU that steps and graphs will take beside what is taken when this returns."""
        runner = Runner(model, 2, collectives=collectives, drafts=max(self.depths) > 0, ahead=True)
        self._largest(runner)
        more = 0
        if self.capture:
            pieces = Captured()
            steps = self._steps(runner, pieces)
            chunk_steps = self._chunk_steps(runner, pieces)
            first, *others = steps.buckets
            steps.prepare([first])
            count = len(others) - 1
            for kind in chunk_steps:
                kind.prepare(kind.buckets[:1])
                count += len(kind.buckets) - 1
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

    def _chunk_steps(self, runner: Runner, pieces: Captured) -> list[ChunkSteps]:
        rows, tokens, depths = self.sequences, self.tokens, self.depths
        dense = {"alone": self.alone_sizes, "halved": self.halved_sizes}
        return [
            runner.use_chunk_steps(
                pieces,
                rows=rows,
                tokens=tokens,
                depths=depths,
                chunks=chunks,
                sparse=sparse,
                **({} if sparse else dense),
            )
            for sparse, chunks in self.chunk_sizes.items()
        ]


def _used(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free
