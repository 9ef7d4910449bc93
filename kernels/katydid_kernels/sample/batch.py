"""What rows of a batch ask of the sampler, as tensors of fixed shape that a captured graph can be refilled through."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["IN_PROMPT", "LogitBias", "Logprobs", "Penalties", "SamplingBatch", "seen_tokens"]

IN_PROMPT = -(1 << 15)
"""The bit of an entry of `Penalties.seen` that says that the prompt has the token; the other 15 count its outputs."""


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
        filters: whether any sampled row has top_k, top_p or min_p set; the reference sorts the vocabulary only then.
        samples: whether any row has a temperature above 0; likewise for the reference alone.
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
    """Penalties of all R rows, and where the tokens that they count are kept.

    Attributes:
        slots: int32 ``[R]``, the row of ``seen`` that is this row's; negative for a row without penalties.
        repetition: fp32 ``[R]``, over prompt and output; 1 is off.
        presence: fp32 ``[R]``, over the output; 0 is off.
        frequency: fp32 ``[R]``, over the output; 0 is off.
        seen: int16 ``[slots, V]``, of `seen_tokens`; `verify_draft` keeps it.
        pending: int32 ``[R, n]``, tokens that count as output beyond what ``seen`` says, negative for none: the drafts
            before the position that a row verifies. None where no row has any.
    """

    slots: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    seen: Tensor
    pending: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LogitBias:
    """``logits[r, token_ids[i]] += values[i]`` for i in ``starts[r] .. starts[r + 1] - 1``, no token twice in a row.

    int32 ``[R + 1]``, int32 ``[N]``, fp32 ``[N]``; N may exceed ``starts[R]``.
    """

    starts: Tensor
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


def seen_tokens(prompt: Tensor, output: Tensor, vocab_size: int) -> Tensor:
    """A row of `Penalties.seen`, int16 ``[vocab_size]``, of the ids of a prompt and of what was generated so far."""
    counts = output.long().bincount(minlength=vocab_size).clamp(max=-IN_PROMPT - 1)
    in_prompt = prompt.long().bincount(minlength=vocab_size) > 0
    return (counts + torch.where(in_prompt, IN_PROMPT, 0)).to(torch.int16)
