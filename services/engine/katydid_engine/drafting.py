"""Drafts the next tokens of every sampled row with a model's draft layer, on the device, after the target has sampled.

The layer goes over the whole batch of the step, so that its own pages hold every position the target computed: at
position p it reads the target's hidden state there and the token at p + 1. The row at which a sequence goes on gives
the first draft; further ones come from the same layer, fed with its own output and its own draft. Positions behind a
rejected draft are written again by the step that gets there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from katydid_engine.batch_builder import BuiltBatch
from katydid_engine.forward_batch import PAGE_SIZE, ForwardBatch
from katydid_engine.host_copies import integers
from katydid_engine.kv_cache import KvCache

__all__ = ["DraftModel", "draft_tokens", "further_drafts", "next_token_ids"]


@runtime_checkable
class DraftModel(Protocol):
    """A model with a draft layer."""

    def draft(self, batch: ForwardBatch, hidden: Tensor, next_token_ids: Tensor, kv_cache: KvCache) -> Tensor: ...

    def likeliest(self, hidden: Tensor) -> Tensor: ...


def next_token_ids(batch: ForwardBatch, following: Sequence[int], sampled: Tensor, runs: Sequence[int]) -> Tensor:
    """The token after each position of a batch, int32 ``[T]``.

    Args:
        following: by sequence behind the decodes, the token after its last, where that is known; else -1.
        sampled: int32 ``[R, Q]``, samples of the rows; decodes have Q each.
        runs: the sequence of each row; of several rows of one sequence the first counts.
    """
    decodes, width = batch.num_decodes, batch.decode_q_len
    ids = torch.empty_like(batch.token_ids)
    start = batch.num_decode_tokens
    ids[start:-1] = batch.token_ids[start + 1 :]
    ends = batch.cu_q_lens[1 + decodes :].long() - 1
    if len(following):
        ids[ends] = integers(following, ids.device)
    of_run: dict[int, int] = {}
    for row, run in enumerate(runs):
        of_run.setdefault(run, row)
    prompts = [run for run in of_run if run >= decodes]
    if prompts:
        at, rows = ([run - decodes for run in prompts], [of_run[run] for run in prompts])
        ids[ends[integers(at, ids.device)]] = sampled[integers(rows, ids.device), 0]
    if decodes:
        # Decodes come first and have one row each, in order.
        ids[:start] = sampled[:decodes, :width].reshape(-1)
    return ids


def draft_tokens(
    model: DraftModel,
    built: BuiltBatch,
    hidden: Tensor,
    next_ids: Tensor,
    kv_cache: KvCache,
    runs: Sequence[int],
    accepted: Tensor,
    depth: int,
) -> Tensor | None:
    """Passes over the batch and drafts ``depth`` tokens for each row: int32 ``[R, depth]``; None for depth 0.

    Args:
        hidden: ``[T, hidden]`` of the target.
        next_ids: of `next_token_ids`.
        runs: the sequence of each row in the batch.
        accepted: int32 ``[R]``, of `verify_draft`.
    """
    batch = built.forward
    states = model.draft(batch, hidden, next_ids, kv_cache)
    if depth == 0 or not runs:
        return None
    of_row = integers(list(runs), hidden.device, torch.int64)
    ends, width = batch.cu_q_lens[1:].long(), batch.decode_q_len
    # A decode goes on at the last sample that is its own, a prompt at its last token.
    at = torch.where(of_row < batch.num_decodes, ends[of_row] - width + accepted - 1, ends[of_row] - 1)
    return further_drafts(model, built, kv_cache, states, at, of_row, depth)


def further_drafts(
    model: DraftModel,
    built: BuiltBatch,
    kv_cache: KvCache,
    states: Tensor,
    at: Tensor,
    of_row: Tensor | None,
    depth: int,
) -> Tensor:
    """Drafts ``depth`` tokens for each of R rows, int32 ``[R, depth]``.

    Args:
        states: ``[T, hidden]``, of the draft layer's pass over the batch.
        at: int ``[R]``, the token of the batch at which each row goes on.
        of_row: int64 ``[R]``, the sequence of each row in the batch; None where rows are the sequences.
    """
    batch = built.forward
    states = states.index_select(0, at)
    tokens = model.likeliest(states)
    drafts = [tokens]
    if depth == 1:
        return tokens.unsqueeze(1)
    positions = batch.positions.index_select(0, at)
    table, limits = batch.block_table, built.inputs.limits
    if of_row is not None:
        table, limits = table[of_row], limits[of_row]
    rows = torch.arange(len(at) + 1, dtype=torch.int32, device=at.device)
    for ahead in range(1, depth):
        places = positions + ahead
        stored = places < limits
        pages = table.gather(1, (places // PAGE_SIZE).clamp(max=table.shape[1] - 1).long().unsqueeze(1)).squeeze(1)
        step = ForwardBatch(
            token_ids=tokens,
            positions=places,
            cu_q_lens=rows,
            # Where a row's pages end it drafts from what they hold.
            context_lens=torch.minimum(places + 1, limits),
            block_table=table,
            slot_mapping=torch.where(stored, pages * PAGE_SIZE + places % PAGE_SIZE, -1),
            num_decodes=len(at),
            decode_q_len=1,
            max_q_len=1,
            max_context_len=batch.max_context_len + ahead,
        )
        states = model.draft(step, states, tokens, kv_cache)
        tokens = model.likeliest(states)
        drafts.append(tokens)
    return torch.stack(drafts, dim=1)
