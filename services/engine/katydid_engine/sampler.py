"""From logits to tokens: collects what the sampled rows ask for into the tensors that ``katydid_kernels.sample`` takes.

A token depends on the row's logits, the sequence's own tokens, its seed and the position, and on nothing else in the
batch. Stop tokens are banned before ``min_tokens``.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from katydid_kernels.sample import LogitBias, Penalties, SamplingBatch, logprobs, sample
from torch import Tensor

from katydid_engine.plan import Logprobs, Start

__all__ = ["Row", "SequenceSampler", "sample_rows", "token_logprobs"]

_SEED_MASK = (1 << 64) - 1


class SequenceSampler:
    """What sampling must remember of one sequence: its parameters and, for penalties, the tokens seen."""

    def __init__(self, start: Start, eos_token_ids: tuple[int, ...]) -> None:
        self.sampling = start.sampling
        self._num_prompt = start.num_prompt
        self._stops = start.sampling.stop_token_ids + (() if start.sampling.ignore_eos else eos_token_ids)
        self._bias = dict(start.sampling.logit_bias)
        self._prompt_ids = sorted(set(start.tokens[: start.num_prompt])) if self._penalises_prompt else []
        self._output_counts = Counter(start.tokens[start.num_prompt :])

    @property
    def _penalises_prompt(self) -> bool:
        return self.sampling.repetition_penalty != 1.0

    @property
    def penalises(self) -> bool:
        sampling = self.sampling
        return self._penalises_prompt or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0

    def note(self, token: int) -> None:
        """A token was sampled for the sequence itself (forks of it start on their own)."""
        if self.penalises:
            self._output_counts[token] += 1

    def seen(self) -> tuple[list[int], list[bool]]:
        """Token ids that penalties count, and which of them are output."""
        output = list(self._output_counts.elements())
        return self._prompt_ids + output, [False] * len(self._prompt_ids) + [True] * len(output)

    def bias(self, position: int) -> dict[int, float]:
        """Additions to the logits of the token at ``position``."""
        if position - self._num_prompt + 1 >= self.sampling.min_tokens:
            return self._bias
        return self._bias | dict.fromkeys(self._stops, -math.inf)


@dataclass(frozen=True, slots=True)
class Row:
    """One token to sample: the sequence, the index of the choice, the position of the token in its sequence."""

    sequence: SequenceSampler
    choice: int
    position: int


def sample_rows(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """One token for each row of ``logits`` (fp32 ``[R, vocab]``)."""
    device = logits.device
    samplings = [row.sequence.sampling for row in rows]
    batch = SamplingBatch(
        temperature=_floats([sampling.temperature for sampling in samplings], device),
        top_k=_ints([sampling.top_k for sampling in samplings], device, torch.int32),
        top_p=_floats([sampling.top_p for sampling in samplings], device),
        min_p=_floats([sampling.min_p for sampling in samplings], device),
        seeds=_ints([_signed(row.sequence.sampling.seed + row.choice) for row in rows], device, torch.int64),
        positions=_ints([row.position for row in rows], device, torch.int32),
        penalties=_penalties(rows, device),
        bias=_bias(rows, device),
        filters=any(s.temperature > 0 and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0) for s in samplings),
        samples=any(sampling.temperature > 0 for sampling in samplings),
    )
    tokens: list[int] = sample(logits, batch).tolist()
    return tokens


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> Logprobs:
    """Log probabilities of ``tokens`` under the model, one for each row of ``logits``, as the host sees them."""
    result = logprobs(logits, _ints(list(tokens), logits.device, torch.int32), top)
    return Logprobs(
        top,
        array("f", result.chosen.tolist()),
        array("I", result.top_ids.flatten().tolist()),
        array("f", result.top.flatten().tolist()),
    )


def _penalties(rows: Sequence[Row], device: torch.device) -> Penalties | None:
    if not any(row.sequence.penalises for row in rows):
        return None
    of_row: list[int] = []
    token_ids: list[int] = []
    is_output: list[bool] = []
    for index, row in enumerate(rows):
        if row.sequence.penalises:
            ids, output = row.sequence.seen()
            token_ids += ids
            is_output += output
            of_row += [index] * len(ids)

    def column(name: str) -> Tensor:
        return _floats([getattr(row.sequence.sampling, name) for row in rows], device)

    return Penalties(
        repetition=column("repetition_penalty"),
        presence=column("presence_penalty"),
        frequency=column("frequency_penalty"),
        rows=_ints(of_row, device, torch.int64),
        token_ids=_ints(token_ids, device, torch.int64),
        is_output=torch.tensor(is_output, dtype=torch.bool).to(device, non_blocking=True),
    )


def _bias(rows: Sequence[Row], device: torch.device) -> LogitBias | None:
    entries = [
        (index, token, value)
        for index, row in enumerate(rows)
        for token, value in row.sequence.bias(row.position).items()
    ]
    if not entries:
        return None
    of_row, token_ids, values = zip(*entries, strict=True)
    return LogitBias(
        _ints(list(of_row), device, torch.int64),
        _ints(list(token_ids), device, torch.int64),
        _floats(list(values), device),
    )


def _signed(seed: int) -> int:
    """The bits of an unsigned 64-bit seed as a signed integer."""
    seed &= _SEED_MASK
    return seed - (1 << 64) if seed >> 63 else seed


def _floats(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)


def _ints(values: list[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
