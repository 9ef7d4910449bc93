"""What one step computes: a packed batch of variable-length token runs, prefill chunks and decodes side by side.

Every index the model needs is an int32 tensor on the model's device; every size a launch needs on the host is a
Python int, so that a forward never waits for the device.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from katydid_engine.attention_plan import AttentionPlan
    from katydid_engine.fixed_prefill import FixedPrefill

__all__ = ["PAGE_SIZE", "ForwardBatch", "PrefillChunk", "TokenRun"]

PAGE_SIZE = 64


@dataclass(frozen=True, slots=True)
class TokenRun:
    """The tokens of one sequence that a step computes.

    Attributes:
        token_ids: the ids at positions ``start .. start + len(token_ids) - 1``; at least one.
        start: tokens of this sequence whose K and V already lie in its pages (0 for a fresh prompt).
        pages: page numbers of the sequence, in order, covering at least ``start + len(token_ids)`` tokens.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """``new`` tokens of a sequence, the last of ``end``; of a prompt of ``prompt`` tokens that may be sparse,
    or None."""

    new: int
    end: int
    prompt: int | None


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """``num_seqs`` (S) sequences, ``num_tokens`` (T) tokens in all, packed one after the other.

    Attributes:
        token_ids: int32 ``[T]``.
        positions: int32 ``[T]``, position of each token in its sequence.
        cu_q_lens: int32 ``[S + 1]``, prefix sums of the runs' lengths: run ``i`` is rows ``cu[i] .. cu[i+1] - 1``.
        context_lens: int32 ``[S]``, tokens of each sequence once this step is done (cached + this run).
        block_table: int32 ``[S, max_pages]``, page numbers in order; entries past a sequence's last page are 0.
        slot_mapping: int32 ``[T]``, where the token's K and V are written: ``page * 64 + offset``. A negative slot
            is not written (the padding rows of a captured graph).
        num_decodes: the first ``num_decodes`` sequences have runs of exactly ``decode_q_len`` tokens and go through
            ``decode_attention``; the rest are prefill chunks.
        decode_q_len: 1, or ``1 + drafts`` when draft tokens are verified; at most 8.
        max_q_len: longest run.
        max_context_len: largest of ``context_lens``.
        prefills: the rows behind the decodes as the host knows them, where some may be computed sparsely; else empty.
        fixed: how its one prefill chunk attends, of one who keeps that in fixed memory: densely, and sparsely where it
            does; else the model plans it.
        attention: made by the model from the rest, once for all its layers.
        q_lens: of the runs behind the decodes, on the host; empty where it does not know them.
        ends: likewise their context lengths.
    """

    token_ids: Tensor
    positions: Tensor
    cu_q_lens: Tensor
    context_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    num_decodes: int
    decode_q_len: int
    max_q_len: int
    max_context_len: int
    prefills: tuple[PrefillChunk, ...] = ()
    fixed: tuple[FixedPrefill, FixedPrefill | None] | None = None
    attention: AttentionPlan | None = None
    q_lens: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]

    @property
    def num_decode_tokens(self) -> int:
        return self.num_decodes * self.decode_q_len

    def split(self, parts: int) -> list[ForwardBatch]:
        """At most ``parts`` batches of whole sequences, in order, that make this one, of about as many sequences each.

        Raises:
            ValueError: ``parts`` is below 1.
        """
        if parts < 1:
            raise ValueError(f"parts={parts}: expected at least 1")
        parts = min(parts, self.num_seqs)
        if parts == 1:
            return [self]
        # The host needs the borders; lengths lie there in the shape of the batch alone when all runs are decodes.
        decodes = self.num_decodes == self.num_seqs
        borders = None if decodes else self.cu_q_lens.tolist()
        batches = []
        for part in range(parts):
            first, last = (self.num_seqs * index // parts for index in (part, part + 1))
            start, end = ((index * self.decode_q_len if borders is None else borders[index]) for index in (first, last))
            batches.append(
                replace(
                    self,
                    token_ids=self.token_ids[start:end],
                    positions=self.positions[start:end],
                    cu_q_lens=self.cu_q_lens[first : last + 1] - start,
                    context_lens=self.context_lens[first:last],
                    block_table=self.block_table[first:last],
                    slot_mapping=self.slot_mapping[start:end],
                    num_decodes=min(max(self.num_decodes - first, 0), last - first),
                    prefills=self.prefills[max(first - self.num_decodes, 0) : max(last - self.num_decodes, 0)],
                    max_q_len=self.decode_q_len
                    if borders is None
                    else max(after - before for before, after in pairwise(borders[first : last + 1])),
                    attention=None,
                )
            )
        return batches

    @property
    def halvable(self) -> bool:
        """Whether `halves` can cut it: what of it is no decode is more than half, known here and computed densely."""
        return bool(self.q_lens) and not self.prefills and 2 * self.num_decode_tokens < self.num_tokens

    def halves(self) -> tuple[ForwardBatch, ForwardBatch]:
        """Its first and its last tokens, about as many each: a run at the border is cut, and goes on behind itself.
        Only of one that is ``halvable``."""
        border, decodes = -(-self.num_tokens // 2), self.num_decodes
        ends = list(accumulate(self.q_lens, initial=self.num_decode_tokens))
        index = bisect.bisect_left(ends, border)  # the first border of runs that is not before
        later = ends[index] - border  # of the run at the border, in the second half
        last, first = decodes + index, decodes + index - (later > 0)
        context_lens, cu_q_lens = self.context_lens[:last].clone(), self.cu_q_lens[: last + 1].clone()
        context_lens[-1:] -= later
        cu_q_lens[-1:] -= later
        rest = self.cu_q_lens[first:] - border
        lengths = [now - before for before, now in pairwise(ends)]
        before, behind = lengths[:index], lengths[first - decodes :]
        before[-1] -= later
        if later:
            rest[:1] = 0
            behind[0] = later
        dense = replace(self, prefills=(), attention=None, ends=())
        return (
            replace(
                dense,
                token_ids=self.token_ids[:border],
                positions=self.positions[:border],
                slot_mapping=self.slot_mapping[:border],
                cu_q_lens=cu_q_lens,
                context_lens=context_lens,
                block_table=self.block_table[:last],
                max_q_len=max(before),
                q_lens=tuple(before),
            ),
            replace(
                dense,
                token_ids=self.token_ids[border:],
                positions=self.positions[border:],
                slot_mapping=self.slot_mapping[border:],
                cu_q_lens=rest,
                context_lens=self.context_lens[first:],
                block_table=self.block_table[first:],
                num_decodes=0,
                max_q_len=max(behind),
                q_lens=tuple(behind),
            ),
        )

    @classmethod
    def pack(
        cls,
        runs: Sequence[TokenRun],
        *,
        num_decodes: int = 0,
        decode_q_len: int = 1,
        device: torch.device | str = "cpu",
    ) -> ForwardBatch:
        """Builds the tensors of a batch; one host-to-device copy each.

        Args:
            runs: decodes first; the first ``num_decodes`` must each hold ``decode_q_len`` tokens.

        Raises:
            ValueError: no runs, an empty run, too few pages for a run, or decodes that are not first.
        """
        if not runs:
            raise ValueError("runs is empty: a batch needs at least one sequence")
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        cu_q_lens = [0]
        context_lens: list[int] = []
        for index, run in enumerate(runs):
            q_len = len(run.token_ids)
            end = run.start + q_len
            if q_len == 0:
                raise ValueError(f"runs[{index}].token_ids is empty: a run computes at least one token")
            if index < num_decodes and q_len != decode_q_len:
                raise ValueError(f"runs[{index}] is a decode of {q_len} tokens, expected decode_q_len={decode_q_len}")
            if len(run.pages) * PAGE_SIZE < end:
                raise ValueError(f"runs[{index}] ends at token {end} but has {len(run.pages)} pages of {PAGE_SIZE}")
            token_ids.extend(run.token_ids)
            positions.extend(range(run.start, end))
            slots.extend(run.pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(run.start, end))
            cu_q_lens.append(cu_q_lens[-1] + q_len)
            context_lens.append(end)
        max_pages = max(-(-length // PAGE_SIZE) for length in context_lens)
        table = [[*run.pages[:max_pages], *([0] * (max_pages - len(run.pages)))] for run in runs]

        def to_device(values: list[int] | list[list[int]]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

        return cls(
            token_ids=to_device(token_ids),
            positions=to_device(positions),
            cu_q_lens=to_device(cu_q_lens),
            context_lens=to_device(context_lens),
            block_table=to_device(table),
            slot_mapping=to_device(slots),
            num_decodes=num_decodes,
            decode_q_len=decode_q_len,
            max_q_len=max(len(run.token_ids) for run in runs),
            max_context_len=max(context_lens),
            q_lens=tuple(len(run.token_ids) for run in runs[num_decodes:]),
            ends=tuple(context_lens[num_decodes:]),
        )
