"""Choosing the next token of every row: penalties, bias, mask, temperature, top-k, top-p, min-p, then Gumbel-max.

In this order, each step on what the one before left:

    1. repetition penalty (Keskar et al., "CTRL", 2019) divides a seen token's logit if positive, else multiplies it
    2. frequency and presence penalty: subtracted per occurrence, and once, for tokens already generated
    3. logit bias: added; -inf bans a token (stop tokens before min_tokens)
    4. the allowed mask of a grammar
    5. temperature; 0 takes the largest logit (the lowest id among equals) and skips the rest
    6. top-k, top-p over what top-k left, min-p relative to the likeliest
    7. argmax of logits / temperature + Gumbel noise from Philox(seed, position)

Log probabilities are those of the model: log-softmax of the logits as they came in, before step 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from katydid_kernels.philox import gumbel_noise

__all__ = [
    "LogitBias",
    "Logprobs",
    "Penalties",
    "SamplingBatch",
    "logprobs",
    "logprobs_reference",
    "sample",
    "sample_reference",
]

_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """What R rows ask for. Tensors lie on the logits' device.

    Attributes:
        temperature: fp32 ``[R]``; 0 is greedy.
        top_k: int32 ``[R]``; 0 keeps all.
        top_p: fp32 ``[R]`` in (0, 1]; the smallest set of likeliest tokens with at least this mass; 1 keeps all.
        min_p: fp32 ``[R]``; drops tokens below this share of the likeliest; 0 keeps all.
        seeds: int64 ``[R]``, the bits of a uint64.
        positions: int32 ``[R]``, index in its sequence of the token to be sampled.
        penalties: None when no row has any.
        bias: None when no row has any.
        allowed: int32 ``[R, ceil(V / 32)]``: bit ``i % 32`` of word ``i // 32`` allows token i; None allows all.
        filters: whether any sampled row has top_k, top_p or min_p set; the vocabulary is sorted only then.
        samples: whether any row has a temperature above 0.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor
    penalties: Penalties | None = None
    bias: LogitBias | None = None
    allowed: Tensor | None = None
    filters: bool = True
    samples: bool = True


@dataclass(frozen=True, slots=True)
class Penalties:
    """What the P rows with penalties ask for, and the tokens that these count.

    Attributes:
        rows: int64 ``[P]``, rows of the batch, none twice.
        repetition: fp32 ``[P]``, over prompt and output; 1 is off.
        presence: fp32 ``[P]``, over the output; 0 is off.
        frequency: fp32 ``[P]``, over the output; 0 is off.
        in_prompt: bool ``[P, V]``, whether the prompt has the token.
        output_counts: int32 ``[P, V]``, how often the token was generated.
    """

    rows: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    in_prompt: Tensor
    output_counts: Tensor


@dataclass(frozen=True, slots=True)
class LogitBias:
    """``logits[rows[i], token_ids[i]] += values[i]``, no pair twice; int64 ``[N]``, int64 ``[N]``, fp32 ``[N]``."""

    rows: Tensor
    token_ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms, fp32.

    Attributes:
        chosen: ``[R]``, of the given tokens.
        top_ids: int32 ``[R, n]``, likeliest first.
        top: ``[R, n]``.
    """

    chosen: Tensor
    top_ids: Tensor
    top: Tensor


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Returns token ids int32 ``[R]``.

    A row whose every token is banned yields token 0.

    Args:
        logits: fp32 ``[R, V]``, left as they are.
    """
    return sample_reference(logits, batch)


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    """Log probabilities of given tokens and of the ``num_top`` likeliest, from the logits as the model made them.

    Args:
        logits: fp32 ``[R, V]``.
        token_ids: int ``[R]``.
        num_top: 0 .. V.
    """
    return logprobs_reference(logits, token_ids, num_top)


def sample_reference(logits: Tensor, batch: SamplingBatch) -> Tensor:
    logits = logits.float()
    if batch.penalties is not None:
        logits = _penalise(logits, batch.penalties)
    if batch.bias is not None:
        bias = torch.zeros_like(logits)
        bias[batch.bias.rows, batch.bias.token_ids] = batch.bias.values
        logits = logits + bias
    if batch.allowed is not None:
        logits = logits.masked_fill(~_unpack_bits(batch.allowed, logits.shape[1]), -torch.inf)
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
    own, counts = logits[penalties.rows], penalties.output_counts
    repetition = penalties.repetition.unsqueeze(1)
    repeated = torch.where(own > 0, own / repetition, own * repetition)
    own = torch.where(penalties.in_prompt | (counts > 0), repeated, own)
    own = own - penalties.frequency.unsqueeze(1) * counts - penalties.presence.unsqueeze(1) * (counts > 0)
    return logits.index_copy(0, penalties.rows, own)


def _unpack_bits(words: Tensor, size: int) -> Tensor:
    bits = (words.unsqueeze(-1) >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1
    return bits.flatten(1)[:, :size].bool()


def _gumbel_max(logits: Tensor, batch: SamplingBatch, rows: Tensor) -> Tensor:
    scaled = logits / batch.temperature[rows].unsqueeze(1)
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
