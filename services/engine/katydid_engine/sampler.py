"""From logits to tokens: collects what the sampled rows ask for into the tensors that ``katydid_kernels.sample`` takes.

A token depends on the row's logits, the sequence's own tokens, its seed and the position, and on nothing else in the
batch. Stop tokens are banned before ``min_tokens``. A row behind drafts counts them as output and stands in its
grammar as if they had been accepted.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from katydid_kernels.sample import LogitBias, Penalties, SamplingBatch, sample
from katydid_kernels.sample import Logprobs as DeviceLogprobs
from torch import Tensor

from katydid_engine.host_copies import floats, integers, to_device
from katydid_engine.plan import Logprobs
from katydid_engine.request import Sampling
from katydid_engine.seen_tokens import SeenTokens
from katydid_engine.sequence_sampler import SequenceSampler

__all__ = ["Row", "SamplingRows", "joined_logprobs", "sample_rows"]

_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One token to sample.

    Attributes:
        sequence: whose.
        choice: index of the choice.
        bias: additions to the logits, -inf bans a token.
        mask: tokens that the grammar allows, int32 ``[1, words]``; None for all.
    """

    sequence: SequenceSampler
    choice: int
    bias: dict[int, float]
    mask: Tensor | None


class SamplingRows:
    """Parameters of rows, as bits of int32 that one copy takes to a device. ``filters``: whether one that samples has
    top_k, top_p or min_p."""

    def __init__(self, samplers: Sequence[SequenceSampler], choices: Sequence[int]) -> None:
        samplings = [sampler.sampling for sampler in samplers]
        self.filters = any(map(_filters, samplings))
        seeds = [_signed(sampling.seed + choice) for sampling, choice in zip(samplings, choices, strict=True)]
        self._seeds = np.array(seeds, dtype=np.int64)
        self._columns = {
            "top_k": np.array([sampling.top_k for sampling in samplings], dtype=np.int32),
            "temperature": np.array([sampling.temperature for sampling in samplings], dtype=np.float32),
            "top_p": np.array([sampling.top_p for sampling in samplings], dtype=np.float32),
            "min_p": np.array([sampling.min_p for sampling in samplings], dtype=np.float32),
        }

    def columns(self, width: int) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.int32]]]:
        """By name, each row ``width`` times; seeds take two places each."""
        by_name = self._columns | {"seeds": self._seeds}
        return {name: np.repeat(column, width).view(np.int32) for name, column in by_name.items()}


def sample_rows(
    logits: Tensor,
    rows: Sequence[Row],
    positions: Tensor,
    seen: SeenTokens,
    pending: Tensor | None = None,
    *,
    sound: Tensor | None = None,
) -> Tensor:
    """One token for each row of ``logits`` (fp32 ``[R, vocab]``): int32 ``[R]``.

    Args:
        positions: int32 ``[R]``, of the tokens in their sequences.
        seen: what penalties count.
        pending: int32 ``[R, n]``, as `Penalties` has it.
        sound: bool ``[R]``, written: whether a row's logits are numbers.
    """
    device = logits.device
    samplings = [row.sequence.sampling for row in rows]
    batch = SamplingBatch(
        temperature=floats([sampling.temperature for sampling in samplings], device),
        top_k=integers([sampling.top_k for sampling in samplings], device),
        top_p=floats([sampling.top_p for sampling in samplings], device),
        min_p=floats([sampling.min_p for sampling in samplings], device),
        seeds=integers([_signed(row.sequence.sampling.seed + row.choice) for row in rows], device, torch.int64),
        positions=positions,
        penalties=_penalties(rows, seen, device, pending),
        bias=_bias(rows, device),
        allowed=_allowed(rows, logits.shape[1], device),
        filters=any(map(_filters, samplings)),
        samples=any(sampling.temperature > 0 for sampling in samplings),
    )
    return sample(logits, batch, sound=sound)


def joined_logprobs(parts: Sequence[DeviceLogprobs]) -> Logprobs:
    """Log probabilities that lie on the host, one part after the other."""
    top = parts[0].top.shape[1]
    joined = Logprobs(top, array("f"))
    for part in parts:
        joined.chosen.extend(part.chosen.tolist())
        joined.top_tokens.extend(part.top_ids.flatten().tolist())
        joined.top_logprobs.extend(part.top.flatten().tolist())
    return joined


def _penalties(rows: Sequence[Row], seen: SeenTokens, device: torch.device, pending: Tensor | None) -> Penalties | None:
    slots = seen.slots([row.sequence for row in rows])
    if slots is None:
        return None
    samplings = [row.sequence.sampling for row in rows]
    return Penalties(
        slots=slots,
        repetition=floats([sampling.repetition_penalty for sampling in samplings], device),
        presence=floats([sampling.presence_penalty for sampling in samplings], device),
        frequency=floats([sampling.frequency_penalty for sampling in samplings], device),
        seen=seen.table,
        pending=pending,
    )


def _bias(rows: Sequence[Row], device: torch.device) -> LogitBias | None:
    entries = [entry for row in rows for entry in row.bias.items()]
    if not entries:
        return None
    token_ids, values = zip(*entries, strict=True)
    return LogitBias(
        integers([0, *itertools.accumulate(len(row.bias) for row in rows)], device),
        integers(list(token_ids), device),
        floats(list(values), device),
    )


def _allowed(rows: Sequence[Row], vocab_size: int, device: torch.device) -> Tensor | None:
    if all(row.mask is None for row in rows):
        return None
    allowed = torch.full((len(rows), -(-vocab_size // 32)), -1, dtype=torch.int32)
    for index, row in enumerate(rows):
        if row.mask is not None:
            allowed[index] = row.mask[0]
    return to_device(allowed, device)


def _filters(sampling: Sampling) -> bool:
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0)


def _signed(seed: int) -> int:
    """The bits of an unsigned 64-bit seed as a signed integer."""
    seed &= _SEED_MASK
    return seed - (1 << 64) if seed >> 63 else seed
