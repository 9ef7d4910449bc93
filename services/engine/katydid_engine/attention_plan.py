"""Attention's part of a step, worked out once and read by every layer: who goes where, and how the work is dealt.

Lengths are the same in all layers, so one launch each of ``decode_plan`` and ``prefill_plan`` serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from katydid_kernels import (
    DecodeScratch,
    SparsePlan,
    StemRule,
    decode_ctas,
    decode_plan,
    prefill_plan,
    sparse_plan,
)
from katydid_kernels.decode_plan import RECORD
from katydid_kernels.stem_select import kept_blocks
from torch import Tensor

from katydid_engine.fixed_prefill import FixedPrefill
from katydid_engine.forward_batch import ForwardBatch
from katydid_engine.sparse_prefill import SparsePrefill

__all__ = ["MAX_Q_LEN", "AttentionPlan", "AttentionPlanner", "stem_rule"]

MAX_Q_LEN = 8


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What attention needs of a batch beyond the batch itself.

    Attributes:
        prefill_cu_q_lens: int32 ``[prefills + 1]``, where each prefill chunk begins among the prefills' tokens; None in
            a batch without any.
        decode: of ``decode_plan``; None on a CPU and in a batch without decodes.
        decode_lens, decode_table, decode_q_len: rows, new tokens each, as the plan and attention take the decodes.
        prefill: of ``prefill_plan``; None on a CPU and in a batch without prefill chunks.
        whole: instead, of a chunk that is planned in fixed memory: its tiles and pieces, and the blocks of each tile.
        sparse: of ``sparse_plan``, where a prefill chunk is of a prompt that is computed sparsely.
        scratch: what decode calls of this stream share; None on a CPU.
    """

    prefill_cu_q_lens: Tensor | None
    decode_lens: Tensor
    decode_table: Tensor
    decode_q_len: int
    decode: Tensor | None = None
    prefill: Tensor | None = None
    whole: tuple[SparsePlan, Tensor] | None = None
    scratch: DecodeScratch | None = None
    sparse: SparsePlan | None = None


class AttentionPlanner:
    """Plans the batches of one model on one stream; its scratch is allocated here, once.

    Args:
        heads, kv_heads: of this rank.

    Attributes:
        sparse_prefill: how long prompts of batches that say so are computed.
        parts_row: whether the tokens of a single decode go to attention one by one. It waits for a chain of latencies
            then, which several tokens a row make longer; that its pages are read as often costs less, out of L2.
    """

    def __init__(self, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
        self.sparse_prefill: SparsePrefill | None = None
        self.parts_row = True
        self._heads, self._kv_heads, self._device = heads, kv_heads, device
        self._ctas = 0
        self._scratch: DecodeScratch | None = None
        if device.type == "cuda":
            self._ctas = decode_ctas(device)
            self._scratch = DecodeScratch.allocate(self._ctas, MAX_Q_LEN, heads // kv_heads, head_dim, device)

    def new_decode_plan(self) -> Tensor | None:
        """Memory for the plan of a batch's decodes, for which ``planned`` makes some of its own otherwise; None on a
        CPU."""
        if self._scratch is None:
            return None
        return torch.empty(self._ctas, RECORD, dtype=torch.int32, device=self._scratch.partial.device)

    def planned(self, batch: ForwardBatch, out: Tensor | None = None) -> ForwardBatch:
        """The batch with its plan; one that has it already is returned as it is. ``out``: of ``new_decode_plan``."""
        if batch.attention is not None:
            return batch
        decodes, tokens = batch.num_decodes, batch.num_decode_tokens
        cu_q_lens = None if decodes == batch.num_seqs else batch.cu_q_lens[decodes:] - tokens
        decode = prefill = None
        lens, table, q_len = batch.context_lens[:decodes], batch.block_table[:decodes], batch.decode_q_len
        if self.parts_row and decodes == 1 and q_len > 1:
            lens, table, q_len = batch.positions[:tokens] + 1, table.expand(tokens, -1), 1
        if self._scratch is not None and decodes:
            decode = decode_plan(
                lens,
                self._kv_heads,
                ctas=self._ctas,
                q_len=q_len,
                block_table=table,
                out=out,
            )
        plan = AttentionPlan(cu_q_lens, lens, table, q_len, decode, scratch=self._scratch)
        if batch.fixed is not None:
            whole, chosen = batch.fixed
            sparse = None if chosen is None else chosen.plan
            return replace(batch, attention=replace(plan, whole=(whole.plan, whole.all_blocks()), sparse=sparse))
        if self._scratch is not None and cu_q_lens is not None:
            prefill = prefill_plan(batch.context_lens[decodes:], cu_q_lens, batch.num_tokens - tokens)
        return replace(batch, attention=replace(plan, prefill=prefill, sparse=self._sparse_plan(batch)))

    def _sparse_plan(self, batch: ForwardBatch) -> SparsePlan | None:
        options, chunks = self.sparse_prefill, batch.prefills
        if options is None:
            return None
        prompts = [
            chunk.prompt if chunk.prompt is not None and chunk.prompt >= options.min_tokens else None
            for chunk in chunks
        ]
        if not any(prompts):
            return None
        new, ends = [chunk.new for chunk in chunks], [chunk.end for chunk in chunks]
        return sparse_plan(stem_rule(options), new, ends, prompts, batch.token_ids.device, heads=self._heads)

    def expect(self, prompt: int) -> None:
        """Works out how many blocks each block of a sparse prompt of so many tokens keeps, which is remembered."""
        assert self.sparse_prefill is not None
        kept_blocks(stem_rule(self.sparse_prefill), prompt)

    def fixed_prefill(self, chunk: int, longest: int, *, sparse: bool) -> FixedPrefill:
        """For graphs of passes with ``chunk`` tokens of a prompt, the last of at most ``longest``."""
        rule = stem_rule(self.sparse_prefill) if sparse and self.sparse_prefill is not None else None
        return FixedPrefill(rule, chunk, longest, self._heads, self._device)


def stem_rule(options: SparsePrefill) -> StemRule:
    """How many blocks of a prompt's layer are kept."""
    return StemRule(options.budget, options.rule, options.decay, tail=options.tail_blocks)
