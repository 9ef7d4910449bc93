"""Sampling in torch: the definition of the kernels' results, and what runs on a machine without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from katydid_kernels.philox import gumbel_noise
from katydid_kernels.sample.batch import LogitBias, Logprobs, Penalties, SamplingBatch

__all__ = ["logprobs_reference", "sample_reference"]

_CANDIDATES = 1024


def sample_reference(logits: Tensor, batch: SamplingBatch, *, sound: Tensor | None = None) -> Tensor:
    logits = logits.float()
    if batch.penalties is not None:
        logits = _penalise(logits, batch.penalties)
    if batch.bias is not None:
        logits = logits + _dense(batch.bias, logits)
    if batch.allowed is not None:
        logits = logits.masked_fill(~_unpack_bits(batch.allowed, logits.shape[1]), -torch.inf)
    if sound is not None:
        sound.copy_(logits.amax(dim=-1).isfinite())
    chosen = logits.argmax(dim=-1)
    if batch.samples:
        rows = (batch.temperature > 0).nonzero().squeeze(1)
        chosen[rows] = _gumbel_max(logits[rows], batch, rows)
    return chosen.to(torch.int32)


def logprobs_reference(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    values = logits.float().log_softmax(dim=-1)
    top, top_ids = values.topk(num_top, dim=-1)
    return Logprobs(values.gather(1, token_ids.long().unsqueeze(1)).squeeze(1), top_ids.to(torch.int32), top)


def _penalise(logits: Tensor, penalties: Penalties) -> Tensor:
    rows = (penalties.slots >= 0).nonzero().squeeze(1)
    own, seen = logits[rows], penalties.seen[penalties.slots[rows].long()].to(torch.int32)
    counts, in_prompt = seen & 0x7FFF, seen < 0
    if penalties.pending is not None:
        pending = penalties.pending[rows].long()
        counts = counts.scatter_add(1, pending.clamp(min=0), (pending >= 0).to(torch.int32))
    repetition = penalties.repetition[rows].unsqueeze(1)
    repeated = own * torch.where(own > 0, 1 / repetition, repetition)
    own = torch.where(in_prompt | (counts > 0), repeated, own)
    own = own - penalties.frequency[rows].unsqueeze(1) * counts - penalties.presence[rows].unsqueeze(1) * (counts > 0)
    return logits.index_copy(0, rows, own)


def _dense(bias: LogitBias, logits: Tensor) -> Tensor:
    count = int(bias.starts[-1])
    counts = (bias.starts[1:] - bias.starts[:-1]).long()
    rows = torch.arange(len(logits), device=logits.device).repeat_interleave(counts)
    dense = torch.zeros_like(logits)
    dense[rows, bias.token_ids[:count].long()] = bias.values[:count]
    return dense


def _unpack_bits(words: Tensor, size: int) -> Tensor:
    bits = (words.unsqueeze(-1) >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1
    return bits.flatten(1)[:, :size].bool()


def _gumbel_max(logits: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    scaled = logits * (1 / batch.temperature[rows]).unsqueeze(1)
    if batch.filters:
        probabilities = scaled.softmax(dim=-1)
        kept = _likeliest(probabilities, batch.top_k[rows], batch.top_p[rows], _CANDIDATES)
        kept &= probabilities >= batch.min_p[rows].unsqueeze(1) * probabilities.amax(dim=-1, keepdim=True)
        scaled = scaled.masked_fill(~kept, -torch.inf)
    return (scaled + gumbel_noise(batch.seeds[rows], batch.positions[rows], logits.shape[1])).argmax(dim=-1)


def _likeliest(probabilities: Tensor, top_k: Tensor, top_p: Tensor, num_candidates: int) -> Tensor:
    """What top-k and then top-p keep, bool ``[R, V]``.

    Sorting a vocabulary is a hundred times the rest of the work, and the kept set is small as a rule: only the
    ``num_candidates`` likeliest are put in order, and rows they do not settle are done again with all.
    """
    vocab_size = probabilities.shape[1]
    num_candidates = min(num_candidates, vocab_size)
    ordered, ids = _in_order(probabilities, num_candidates)
    mass = ordered.cumsum(dim=-1)
    limit = torch.where(top_k > 0, top_k, vocab_size).unsqueeze(1)
    mass_of_top_k = mass.gather(1, limit.clamp(max=num_candidates).long() - 1)
    total = torch.where(limit < vocab_size, mass_of_top_k, 1.0)
    top_p = top_p.unsqueeze(1)
    kept = torch.arange(num_candidates, device=ids.device) < limit
    kept &= (top_p >= 1) | (mass - ordered < top_p * total)
    result = torch.zeros_like(probabilities, dtype=torch.bool).scatter_(1, ids, kept)
    if num_candidates == vocab_size:
        return result
    # Settled: the set ends before the candidates do, not among equals that may go on outside them, and top-p knew the
    # mass that top-k leaves.
    num_kept = kept.sum(dim=-1, keepdim=True).clamp(min=1)  # none where every token is banned
    unfiltered = (limit >= vocab_size) & (top_p >= 1)
    ends_inside = (num_kept < num_candidates) & (ordered.gather(1, num_kept - 1) > ordered[:, -1:])
    settled = unfiltered | (ends_inside & ((limit <= num_candidates) | (limit >= vocab_size)))
    result |= unfiltered
    open_rows = (~settled).nonzero()[:, 0]
    if len(open_rows):
        result[open_rows] = _likeliest(probabilities[open_rows], top_k[open_rows], top_p[open_rows, 0], vocab_size)
    return result


def _in_order(probabilities: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row and their ids, largest first, equals in the order of their ids."""
    if count == probabilities.shape[1]:
        return torch.sort(probabilities, dim=-1, descending=True, stable=True)
    ids = probabilities.topk(count, dim=-1).indices.sort(dim=-1).values
    ordered, order = torch.sort(probabilities.gather(1, ids), dim=-1, descending=True, stable=True)
    return ordered, ids.gather(1, order)
