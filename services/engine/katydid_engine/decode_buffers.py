"""Tensors of decode steps that never move: what a captured graph reads its step from.

A bucket is a number of rows and of tokens a row. What the host says of a step lies in one int32 buffer, filled by one
copy; the layout depends on the bucket alone. Rows that fill a bucket up have length 0, write nowhere and continue no
row, so that they change nothing for the others. What a step leaves for the next one lies in tensors of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from katydid_kernels import Sampled, StepInputs
from katydid_kernels.sample import SamplingBatch
from torch import Tensor

from katydid_engine.batch_builder import BuiltBatch, DecodeRows, Int32s
from katydid_engine.forward_batch import ForwardBatch
from katydid_engine.host_copies import to_device
from katydid_engine.sampler import SamplingRows

__all__ = ["Bucket", "BucketTensors", "DecodeBuffers"]

# Kernels specialise on 16-byte alignment: every tensor begins on such a border.
_ALIGNMENT = 4
_ALIGNED_BYTES = 16
_BY_TOKEN = ("token_ids", "positions", "slot_mapping", "sample_positions", "top_k", "temperature", "top_p", "min_p")
_BY_ROW = ("context_lens", "limits", "previous", "num_drafts")


@dataclass(frozen=True, slots=True)
class Bucket:
    """``rows`` of ``width`` tokens each, their own and ``width - 1`` drafts; ``drafts`` are made for the next step."""

    rows: int
    width: int
    drafts: int

    @property
    def tokens(self) -> int:
        return self.rows * self.width


@dataclass(frozen=True, slots=True)
class BucketTensors:
    """A bucket's view of the buffers.

    Attributes:
        built: the batch, padded.
        previous: int32 ``[rows]``, the row of the step before that each continues; negative for none.
        num_drafts: int32 ``[rows]``.
        sampling: of ``[rows * width]`` tokens.
        before_first: int32 ``[rows]``, one less than the place of each row's first token.
    """

    built: BuiltBatch
    previous: Tensor
    num_drafts: Tensor
    sampling: SamplingBatch
    before_first: Tensor


class DecodeBuffers:
    """Buffers of buckets up to ``rows`` by ``width``, for sequences of up to ``pages`` pages.

    Attributes:
        left: what the last step sampled, of ``rows`` rows; see `Sampled`.
        sound: bool ``[rows * width]``, whether the logits of each of its tokens are numbers.
    """

    def __init__(self, rows: int, width: int, pages: int, device: torch.device) -> None:
        self._device = device
        # Behind what a bucket holds there is room for the block tables, on their way to where rows have fixed places.
        self._ints = torch.zeros(_size(Bucket(rows, width, 0)) + rows * pages, dtype=torch.int32, device=device)
        self._table = torch.zeros(rows, pages, dtype=torch.int32, device=device)
        ends = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._ends = [ends * each for each in range(width + 1)]
        self._before_first = [each - 1 for each in self._ends]
        shapes = [(rows, width), (rows,), (rows,), (rows, max(1, width - 1))]
        # One memory, which one copy takes to the host.
        *left, self.sound = _in_one_memory(
            [*((shape, torch.int32) for shape in shapes), ((rows * width,), torch.bool)], device
        )
        self.left = Sampled(*left)
        self.left.accepted.fill_(1)

    @property
    def rows(self) -> int:
        return self._table.shape[0]

    @property
    def pages(self) -> int:
        return self._table.shape[1]

    def bucket(self, bucket: Bucket) -> BucketTensors:
        """The tensors of a bucket; the same memory whenever asked."""
        return self._tensors(bucket, bucket.rows)

    def clear(self, bucket: Bucket) -> None:
        """A step of no rows: another bucket's numbers may lie here, which are no rows of this one's."""
        host = _blank(bucket)
        self._ints[: len(host)].copy_(to_device(torch.from_numpy(host), self._device))

    def fill(
        self,
        bucket: Bucket,
        rows: DecodeRows,
        sampling: SamplingRows,
        previous: Sequence[int],
        num_drafts: Sequence[int],
    ) -> BucketTensors:
        """Copies a step of fewer rows than the bucket has to the device; the step's own rows of the tensors."""
        host, places = _blank(bucket), _places(bucket)
        columns: dict[str, Int32s | Sequence[int]] = {
            "token_ids": rows.token_ids,
            "positions": rows.positions,
            "slot_mapping": rows.slots,
            "sample_positions": rows.positions + 1,
            "context_lens": rows.context_lens,
            "limits": rows.limits,
            "previous": previous,
            "num_drafts": num_drafts,
            **sampling.columns(bucket.width),
        }
        for name, column in columns.items():
            start = places[name][0]
            host[start : start + len(column)] = column
        size, (count, used) = len(host), rows.table.shape
        host = np.concatenate([host, rows.table.ravel()])
        self._ints[: len(host)].copy_(to_device(torch.from_numpy(host), self._device))
        self._table[:count, :used].copy_(self._ints[size : len(host)].view(count, used))
        return self._tensors(bucket, count, max_context_len=int(rows.context_lens.max()))

    def keep(self, step: Sampled) -> Sampled:
        """Another step's rows in place of what the last one left here."""
        count, width = step.tokens.shape
        kept = self.left
        kept.tokens[:count, :width].copy_(step.tokens)
        kept.accepted[:count].copy_(step.accepted)
        kept.first_positions[:count].copy_(step.first_positions)
        made = 0 if step.drafts is None else step.drafts.shape[1]
        if step.drafts is not None and kept.drafts is not None:
            kept.drafts[:count, :made].copy_(step.drafts)
        return self.kept(count, width, made)

    def kept(self, count: int, width: int, drafts: int) -> Sampled:
        """The first ``count`` rows of what the last step left, with so many samples and drafts each."""
        left = self.left
        made = None if left.drafts is None or not drafts else left.drafts[:count, :drafts]
        return Sampled(left.tokens[:count, :width], left.accepted[:count], left.first_positions[:count], made)

    def _tensors(self, bucket: Bucket, rows: int, max_context_len: int | None = None) -> BucketTensors:
        width, places = bucket.width, _places(bucket)
        tokens = rows * width

        def part(name: str) -> Tensor:
            start = places[name][0]
            return self._ints[start : start + (rows if name in _BY_ROW else tokens)]

        seeds, pending = (places[name][0] for name in ("seeds", "pending"))
        table = self._table[:rows]
        inputs = StepInputs(
            token_ids=part("token_ids"),
            positions=part("positions"),
            slot_mapping=part("slot_mapping"),
            context_lens=part("context_lens"),
            block_table=table,
            sample_positions=part("sample_positions"),
            limits=part("limits"),
            pending=self._ints[pending : pending + (width - 1) * tokens].view(tokens, -1) if width > 1 else None,
        )
        forward = ForwardBatch(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            cu_q_lens=self._ends[width][: rows + 1],
            context_lens=inputs.context_lens,
            block_table=table,
            slot_mapping=inputs.slot_mapping,
            num_decodes=rows,
            decode_q_len=width,
            max_q_len=width,
            max_context_len=max_context_len or self.pages * 64,
        )
        sampling = SamplingBatch(
            temperature=part("temperature").view(torch.float32),
            top_k=part("top_k"),
            top_p=part("top_p").view(torch.float32),
            min_p=part("min_p").view(torch.float32),
            seeds=self._ints[seeds : seeds + 2 * tokens].view(torch.int64),
            positions=inputs.sample_positions,
        )
        return BucketTensors(
            BuiltBatch(forward, inputs),
            part("previous"),
            part("num_drafts"),
            sampling,
            self._before_first[width][:rows],
        )


def _in_one_memory(parts: Sequence[tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> list[Tensor]:
    """Zeros of these shapes and dtypes, one behind the other."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in parts]
    starts = [0, *itertools.accumulate(-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes)]
    whole = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
    return [
        whole[start : start + size].view(dtype).view(shape)
        for start, size, (shape, dtype) in zip(starts, sizes, parts, strict=False)
    ]


def _blank(bucket: Bucket) -> Int32s:
    """What the host says of rows that fill a bucket up."""
    host: Int32s = np.zeros(_size(bucket), dtype=np.int32)
    for name in ("slot_mapping", "previous", "pending"):
        host[slice(*_places(bucket)[name])] = -1
    return host


def _places(bucket: Bucket) -> dict[str, tuple[int, int]]:
    """Where each column of a bucket begins and ends in the buffer."""
    tokens = bucket.tokens
    sizes = dict.fromkeys(_BY_TOKEN, tokens) | dict.fromkeys(_BY_ROW, bucket.rows)
    sizes |= {"seeds": 2 * tokens, "pending": (bucket.width - 1) * tokens}
    places, start = {}, 0
    for name, size in sizes.items():
        places[name] = (start, start + size)
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places


def _size(bucket: Bucket) -> int:
    *_, (_, end) = _places(bucket).values()
    return -(-end // _ALIGNMENT) * _ALIGNMENT
