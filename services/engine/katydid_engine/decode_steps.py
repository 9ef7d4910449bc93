"""Steps of decodes alone, as two pieces of work over tensors that never move: on a GPU two graphs a bucket.

    forward    the step's inputs corrected by what the step before left (`advance`), attention planned, the model
    choice     logits, sampling, verification, and the drafts of the next step

Between the two the host may do what needs the step before, such as a grammar's masks. There are two choices a bucket:
of rows that ask for nothing beyond temperature, filters and a seed, and of rows that do (`logit_terms.py`). Ranks of a
group have two more, of rows that ask for nothing beyond: with filters, and without (`parted_vocabulary.py`). What is
captured allocates nothing outside its pool and waits for nothing.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from katydid_kernels import Sampled, advance, sample, verify_draft
from katydid_kernels.gemm.dense import runs_gluon
from katydid_kernels.sample import logprobs
from torch import Tensor

from katydid_engine.collectives import Collectives
from katydid_engine.decode_buffers import Bucket, BucketTensors, DecodeBuffers
from katydid_engine.drafting import DraftModel, further_drafts
from katydid_engine.fixed_room import MOST_FIXED_ROWS
from katydid_engine.forced_agreement import ForcedAgreement
from katydid_engine.forward_batch import ForwardBatch
from katydid_engine.kv_cache import KvCache
from katydid_engine.logit_terms import Asked, LogitTerms
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.parted_vocabulary import sample_parts
from katydid_engine.seen_tokens import SeenTokens
from katydid_engine.step_outcome import Left

__all__ = ["Briefly", "Captured", "DecodeSteps", "Pieces", "Uncaptured", "row_buckets"]

_PARTED_CHOICES = tuple(Asked(parted=True, filters=filters) for filters in (False, True))
_SMALL = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)


def row_buckets(most: int) -> list[int]:
    """Numbers of rows that steps are padded to, ``most`` last: closer where a row more costs more."""
    larger = range(96, most, 32) if most > 64 else ()
    return [*(rows for rows in (*_SMALL, *larger) if rows < most), most]


Briefly = Callable[[], AbstractContextManager[None]]
_WHOLE: Briefly = contextlib.nullcontext


class Pieces(Protocol):
    """How pieces of work are carried out."""

    def prepare(self, key: tuple[str, Bucket], work: Callable[[], None], briefly: Briefly = _WHOLE) -> None:
        """Before the first step; ``work`` reads and writes the same memory whenever it is done, and within ``briefly``
        launches every kernel that it has, each fewer times."""
        ...

    def run(self, key: tuple[str, Bucket]) -> None: ...


class Uncaptured:
    """Does the work each time: on a host, and where a graph is in doubt."""

    def __init__(self) -> None:
        self._works: dict[tuple[str, Bucket], Callable[[], None]] = {}

    def __len__(self) -> int:
        return len(self._works)

    def prepare(self, key: tuple[str, Bucket], work: Callable[[], None], briefly: Briefly = _WHOLE) -> None:  # noqa: ARG002
        self._works[key] = work

    def run(self, key: tuple[str, Bucket]) -> None:
        self._works[key]()


class Captured:
    """CUDA graphs that share the memory of what they compute in between: no two of them run at once."""

    def __init__(self) -> None:
        self._graphs: dict[tuple[str, Bucket], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self._graphs)

    def prepare(self, key: tuple[str, Bucket], work: Callable[[], None], briefly: Briefly = _WHOLE) -> None:
        # Once outside: kernels are compiled and loaded, scratch that outlives the graph is allocated.
        with briefly():
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which collects garbage and empties the allocator each time.
        with torch.cuda.stream(self._stream):
            # A kernel that was not met outside may still be loaded.
            graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
            try:
                work()
            except BaseException:
                # It fails too, and would hide why.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        # The first time a graph is carried out it is brought to the device.
        graph.replay()
        self._graphs[key] = graph

    def run(self, key: tuple[str, Bucket]) -> None:
        self._graphs[key].replay()


class DecodeSteps:
    """Of one rank that samples.

    Args:
        rows: most of a step.
        pages: most of a sequence.
        depths: numbers of drafts that steps verify and make.
        seen: what penalties count.
        agreement: share of drafts that count as sampled, whatever is sampled: for timing weights that predict nothing.

    Attributes:
        terms: what a step's rows ask of the logits beyond a sampler's usual parameters.
    """

    def __init__(
        self,
        model: DecoderLM,
        kv_cache: KvCache,
        collectives: Collectives,
        pieces: Pieces,
        seen: SeenTokens,
        *,
        rows: int,
        pages: int,
        depths: Iterable[int],
        agreement: float | None = None,
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._collectives = collectives
        self._pieces = pieces
        self._forced = None if agreement is None else ForcedAgreement(agreement, rows, max(depths), model.device)
        self._overlap = runs_gluon(model.device)
        self._depths = sorted(set(depths), reverse=True)
        self._rows = row_buckets(rows)
        self._room: dict[Bucket, int | None] = {}
        # One plan a step serves the target's layers and the draft layer's.
        self._plan = model.new_decode_plan()
        self._planned: dict[Bucket, ForwardBatch] = {}
        # What the first graph of a bucket leaves for the second stays where it was made.
        self._hidden: dict[Bucket, Tensor] = {}
        width = 1 + max(self._depths)
        self.buffers = DecodeBuffers(rows, width, pages, model.device)
        self.terms = LogitTerms(rows, width, model.config.vocab_size, seen, model.device)

    @property
    def buckets(self) -> list[Bucket]:
        """The largest first: what it needs of memory is enough for the others."""
        sizes = [Bucket(rows, 1 + depth, depth) for depth in self._depths for rows in reversed(self._rows)]
        return [bucket for bucket in sizes if self._holds(bucket)]

    @torch.inference_mode()
    def prepare(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Prepares buckets, by default all; no step may be under way."""
        # What is collected while a graph is captured may give memory back in its middle.
        gc.collect()
        gc.disable()
        try:
            with self._model.exchange_kept():
                for bucket in self.buckets if buckets is None else buckets:
                    self._prepare(bucket)
        finally:
            gc.enable()

    def _prepare(self, bucket: Bucket) -> None:
        self.buffers.clear(bucket)
        self._room[bucket] = self._model.exchange_rows(self._model.rows_at_once(bucket.rows, bucket.width))
        self._pieces.prepare(("forward", bucket), lambda: self._forward(bucket), self._model.one_layer_of_a_kind)
        for asked in self._choices:
            self._pieces.prepare((_name(asked), bucket), functools.partial(self._choice, bucket, asked))

    @property
    def _choices(self) -> tuple[Asked, ...]:
        """All that this rank is ever asked for, in an order in which ranks of a group meet."""
        if self._collectives.size == 1:
            return Asked(), Asked(terms=True)
        return Asked(terms=self._collectives.rank == 0), *_PARTED_CHOICES

    def bucket(self, rows: int, width: int) -> Bucket | None:
        """The smallest that such a step fits; None where it is none of those prepared. Its own drafts are as many as
        the step makes, unless the depth changes: then only ``forward`` is for it."""
        if width - 1 not in self._depths or rows > self._rows[-1]:
            return None
        bucket = Bucket(next(size for size in self._rows if size >= rows), width, width - 1)
        return bucket if self._holds(bucket) else None

    def _holds(self, bucket: Bucket) -> bool:
        """Whether a graph can hold it: all sizes must be known before."""
        return bucket.tokens <= MOST_FIXED_ROWS or not self._model.dispatched

    def bucket_in(self, rows: int, width: int, room: int | None) -> Bucket | None:
        """As ``bucket``, of those in which rows that go to experts on other ranks take just so much room there."""
        sizes = [Bucket(size, width, width - 1) for size in self._rows if size >= rows]
        return next((bucket for bucket in sizes if room is not None and self._room.get(bucket) == room), None)

    def forward(self, bucket: Bucket) -> Tensor:
        """Computes what the buffers hold: hidden states of the whole bucket, ``[rows * width, hidden]``."""
        self._run(("forward", bucket), 1)
        return self._hidden[bucket]

    def choose(self, bucket: Bucket, rows: int, asked: Asked) -> tuple[Left, Sampled]:
        """Samples, verifies and drafts after ``forward``; of the step's own rows. What they ask lies in ``terms``."""
        self._run((_name(asked), bucket), bucket.drafts)
        step = self.buffers.kept(rows, bucket.width, bucket.drafts)
        sound = self.buffers.sound[: rows * bucket.width].view(rows, bucket.width)
        return Left(step.tokens, step.accepted, step.first_positions, step.drafts, sound), step

    def _run(self, key: tuple[str, Bucket], passes: int) -> None:
        """With so many passes of the model in it, which hears nothing of those that a graph carries out."""
        left = max(0, self._model.agreed_passes - passes)
        self._pieces.run(key)
        self._model.agreed_passes = left

    def _forward(self, bucket: Bucket) -> None:
        tensors = self.buffers.bucket(bucket)
        advance(tensors.built.inputs, self.buffers.left, tensors.previous)
        self._planned[bucket] = self._model.planned(tensors.built.forward, self._plan)
        self._hidden[bucket] = self._model.forward(self._planned[bucket], self._kv_cache)

    def _choice(self, bucket: Bucket, asked: Asked) -> None:
        rows, width = bucket.rows, bucket.width
        tensors, left = self.buffers.bucket(bucket), self.buffers.left
        inputs = tensors.built.inputs
        hidden = self._hidden[bucket]
        tokens = self._sampled(bucket, tensors, hidden, asked).view(rows, width)
        drafts = inputs.token_ids.view(rows, width)[:, 1:]
        if self._forced is not None and bucket.drafts:
            self._forced.sample(drafts, tokens)
        slots, seen = self.terms.counted if asked.terms else (None, None)
        accepted = verify_draft(
            tokens,
            drafts,
            num_drafts=tensors.num_drafts,
            slots=None if slots is None else slots[:rows],
            seen=seen,
            first_positions=inputs.sample_positions.view(rows, width)[:, 0],
            left=left,
            overlap=self._overlap,
        )
        if bucket.drafts:
            self._draft(tensors, hidden, tokens, accepted, bucket)

    def _sampled(self, bucket: Bucket, tensors: BucketTensors, hidden: Tensor, asked: Asked) -> Tensor:
        """int32 ``[rows * width]``, the same on every rank."""
        sound, group = self.buffers.sound[: bucket.tokens], self._collectives
        if asked.parted:
            return sample_parts(self._model.head, group, hidden, tensors.sampling, filters=asked.filters, sound=sound)
        logits = self._model.logits(hidden)
        sampling = tensors.sampling
        if asked.terms:
            sampling = self.terms.batch(sampling, tensors.built.inputs.pending)
        tokens = sample(logits, sampling, sound=sound, overlap=self._overlap)
        if asked.terms:
            self.terms.keep(logprobs(logits, tokens, self.terms.logprobs.top.shape[1]))
        # What rows ask for the first rank alone knows; others go on from the same tokens.
        return tokens if group.size == 1 else group.all_reduce(tokens if group.rank == 0 else torch.zeros_like(tokens))

    def _draft(self, tensors: BucketTensors, hidden: Tensor, tokens: Tensor, accepted: Tensor, bucket: Bucket) -> None:
        assert isinstance(self._model, DraftModel)
        states = self._model.draft(self._planned[bucket], hidden, tokens.reshape(-1), self._kv_cache)
        at = tensors.before_first + accepted
        drafts = further_drafts(self._model, tensors.built, self._kv_cache, states, at, None, bucket.drafts)
        assert self.buffers.left.drafts is not None
        self.buffers.left.drafts[: bucket.rows, : bucket.drafts].copy_(drafts)


def _name(asked: Asked) -> str:
    if asked.parted:
        return "parted choice" + " with filters" * asked.filters
    return "choice by terms" if asked.terms else "choice"
