"""Block tables kept between steps, and the tensors of a step built from them in one copy to the device.

Plans carry only what changed of a block table. The tables lie in one int32 array on the host, a row a sequence, so that
a step of 256 long sequences is a slice of it and not a million Python integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from katydid_kernels import StepInputs
from torch import Tensor

from katydid_engine.forward_batch import PAGE_SIZE, ForwardBatch
from katydid_engine.host_copies import to_device
from katydid_engine.plan import Run

__all__ = ["BatchBuilder", "BuiltBatch", "DecodeRows", "Int32s"]

Int32s = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
# Kernels specialise on 16-byte alignment: every tensor begins on such a border.
_ALIGNMENT = 4
_FIRST_ROWS = 16
_FIRST_PAGES = 64


@dataclass(frozen=True, slots=True)
class BuiltBatch:
    """``inputs`` are the decode rows of ``forward``, for `advance` to rewrite in place; their ``block_table`` and
    ``limits`` are those of all rows, decodes first."""

    forward: ForwardBatch
    inputs: StepInputs


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """R decodes of Q tokens each as the host knows them, int32: ``[R * Q]`` tokens in order, ``[R]`` rows, and their
    block tables ``[R, pages]``."""

    token_ids: Int32s
    positions: Int32s
    slots: Int32s
    context_lens: Int32s
    limits: Int32s
    table: Int32s


class BatchBuilder:
    """Rows of block tables by sequence id; ``build`` makes the tensors of a step on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: Int32s = np.zeros((_FIRST_ROWS, _FIRST_PAGES), dtype=np.int32)
        self._num_pages: Int32s = np.zeros(_FIRST_ROWS, dtype=np.int32)
        self._free_rows = list(range(_FIRST_ROWS))
        self._rows: dict[int, int] = {}

    def start(self, sequence: int) -> None:
        """A sequence appears, with an empty table."""
        if not self._free_rows:
            rows = len(self._tables)
            self._grow((2 * rows, self._tables.shape[1]))
            self._free_rows = list(range(rows, 2 * rows))
        row = self._rows[sequence] = self._free_rows.pop()
        self._tables[row] = 0
        self._num_pages[row] = 0

    def end(self, sequence: int) -> None:
        self._free_rows.append(self._rows.pop(sequence))

    def build(self, runs: Sequence[Run], num_decodes: int, decode_q_len: int = 1) -> BuiltBatch:
        """The batch of ``runs``, of which the first ``num_decodes`` compute ``decode_q_len`` tokens each: their own,
        then 0 in the place of drafts. Notes the runs' new pages. What lies behind a row's pages is not stored."""
        rows = [self._update(run) for run in runs]
        counts = np.array([len(run.tokens) for run in runs], dtype=np.int32)
        counts[:num_decodes] = decode_q_len
        starts = np.array([run.start for run in runs], dtype=np.int32)
        ends = np.cumsum(counts, dtype=np.int32)
        context_lens = starts + counts
        max_context_len = int(context_lens.max())
        columns = -(-max_context_len // PAGE_SIZE)
        if columns > self._tables.shape[1]:
            self._grow((len(self._tables), 2 * columns))
        tables = self._tables[rows, :columns]
        limits = self._num_pages[rows] * PAGE_SIZE
        of_run = np.repeat(np.arange(len(runs)), counts)
        positions = np.arange(int(ends[-1]), dtype=np.int32) + np.repeat(starts - (ends - counts), counts)
        slots = tables[of_run, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        slots[~np.repeat(np.array([run.writes for run in runs]), counts)] = -1
        slots[positions >= limits[of_run]] = -1
        token_ids = np.concatenate([np.frombuffer(run.tokens, dtype=np.int32) for run in runs])
        num_rows = num_decodes * decode_q_len
        if decode_q_len > 1:
            drafted = np.zeros((num_decodes, decode_q_len), dtype=np.int32)
            drafted[:, 0] = token_ids[:num_decodes]
            token_ids = np.concatenate([drafted.ravel(), token_ids[num_decodes:]])
        parts = [token_ids, positions, np.insert(ends, 0, 0), context_lens, slots, tables.ravel(), limits]
        parts.append(positions[:num_rows] + np.int32(1))
        tensors = self._to_device(parts)
        block_table = tensors[5].view(len(runs), -1)
        forward = ForwardBatch(
            token_ids=tensors[0],
            positions=tensors[1],
            cu_q_lens=tensors[2],
            context_lens=tensors[3],
            slot_mapping=tensors[4],
            block_table=block_table,
            num_decodes=num_decodes,
            decode_q_len=decode_q_len,
            max_q_len=int(counts.max()),
            max_context_len=max_context_len,
            q_lens=tuple(counts[num_decodes:].tolist()),
            ends=tuple(context_lens[num_decodes:].tolist()),
        )
        inputs = StepInputs(
            token_ids=tensors[0][:num_rows],
            positions=tensors[1][:num_rows],
            slot_mapping=tensors[4][:num_rows],
            context_lens=tensors[3][:num_decodes],
            block_table=block_table,
            sample_positions=tensors[7],
            limits=tensors[6],
        )
        return BuiltBatch(forward, inputs)

    def decode_rows(self, runs: Sequence[Run], width: int) -> DecodeRows:
        """Decodes of ``width`` tokens each: their own, then 0 in the place of drafts. Notes the runs' new pages."""
        rows = [self._update(run) for run in runs]
        starts = np.array([run.start for run in runs], dtype=np.int32)
        context_lens = starts + np.int32(width)
        columns = -(-int(context_lens.max()) // PAGE_SIZE)
        if columns > self._tables.shape[1]:
            self._grow((len(self._tables), 2 * columns))
        tables = self._tables[rows, :columns]
        limits = self._num_pages[rows] * PAGE_SIZE
        positions = starts[:, None] + np.arange(width, dtype=np.int32)
        slots = np.take_along_axis(tables, positions // PAGE_SIZE, 1) * PAGE_SIZE + positions % PAGE_SIZE
        writes = np.array([run.writes for run in runs])
        slots[(positions >= limits[:, None]) | ~writes[:, None]] = -1
        token_ids = np.zeros((len(runs), width), dtype=np.int32)
        token_ids[:, 0] = [run.tokens[0] for run in runs]
        return DecodeRows(token_ids.ravel(), positions.ravel(), slots.ravel(), context_lens, limits, tables)

    def _update(self, run: Run) -> int:
        row = self._rows[run.sequence]
        end = run.table_from + len(run.pages)
        if end > self._tables.shape[1]:
            self._grow((len(self._tables), 2 * end))
        self._tables[row, run.table_from : end] = run.pages
        self._num_pages[row] = end
        return row

    def _grow(self, shape: tuple[int, int]) -> None:
        larger: Int32s = np.zeros(shape, dtype=np.int32)
        larger[: self._tables.shape[0], : self._tables.shape[1]] = self._tables
        self._tables = larger
        self._num_pages = np.concatenate([self._num_pages, np.zeros(shape[0] - len(self._num_pages), dtype=np.int32)])

    def _to_device(self, columns: Sequence[Int32s]) -> list[Tensor]:
        """The columns as tensors, by one copy of all of them."""
        offsets = [0]
        for column in columns:
            offsets.append(offsets[-1] + -(-len(column) // _ALIGNMENT) * _ALIGNMENT)
        packed: Int32s = np.zeros(offsets[-1], dtype=np.int32)
        for offset, column in zip(offsets, columns, strict=False):
            packed[offset : offset + len(column)] = column
        tensor = to_device(torch.from_numpy(packed), self._device)
        return [tensor[offset : offset + len(column)] for offset, column in zip(offsets, columns, strict=False)]
