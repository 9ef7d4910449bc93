"""From logits to tokens: collects what the sampled rows ask for into the tensors that ``katydid_kernels.sample`` takes.

A token depends on the row's logits, the sequence's own tokens, its seed and the position, and on nothing else in the
batch. Stop tokens are banned before ``min_tokens``.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from katydid_kernels.sample import (
    IN_PROMPT,
    LogitBias,
    Penalties,
    SamplingBatch,
    logprobs,
    sample,
    seen_tokens,
)
from torch import Tensor

from katydid_engine.compiled_grammars import CompiledGrammars
from katydid_engine.grammar import Grammar
from katydid_engine.grammar_state import GrammarState
from katydid_engine.plan import Logprobs, Start

__all__ = ["Row", "SequenceSampler", "sample_rows", "token_logprobs"]

_SEED_MASK = (1 << 64) - 1


class SequenceSampler:
    """What sampling must remember of one sequence: its parameters and, for penalties, the tokens seen.

    The tokens seen are counts on the logits' device, made when the sequence is first sampled and carried on by one
    token a step: a step costs the same however long the sequence is.
    """

    def __init__(self, start: Start, eos_token_ids: tuple[int, ...], grammars: CompiledGrammars | None = None) -> None:
        self.sampling = start.sampling
        self.grammar: GrammarState | None = None
        self.misfit = ""
        self._start = start
        self._stops = start.sampling.stop_token_ids + (() if start.sampling.ignore_eos else eos_token_ids)
        self._bias = dict(start.sampling.logit_bias)
        self._seen: Tensor | None = None
        if start.sampling.grammar is not None and grammars is not None:
            self._enter_grammar(start.sampling.grammar, grammars, eos_token_ids)

    @property
    def penalises(self) -> bool:
        sampling = self.sampling
        return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)

    def seen(self, vocab_size: int, device: torch.device) -> Tensor:
        """The tokens of prompt and output, as ``Penalties.seen`` keeps them: int16 ``[vocab_size]``."""
        if self._seen is None:
            tokens, end = np.frombuffer(self._start.tokens, dtype=np.int32), self._start.num_prompt
            prompt, output = (torch.from_numpy(part.copy()) for part in (tokens[:end], tokens[end:]))
            self._seen = seen_tokens(prompt, output, vocab_size).to(device)
        return self._seen

    def note(self, token: int) -> None:
        """The token just sampled is the sequence's own (forks of it start on their own)."""
        if self._seen is not None and int(self._seen[token]) & ~IN_PROMPT < ~IN_PROMPT:
            self._seen[token] += 1
        if self.grammar is not None:
            self.grammar.accept(token)

    def completes(self, token: int) -> bool:
        """Whether the grammar ends with ``token``."""
        if self.grammar is None or not self.grammar.accept(token):
            return False
        ended = self.grammar.ended
        self.grammar.rollback(1)
        return ended

    def allowed(self) -> Tensor | None:
        """The mask of the next token, int32 ``[1, words]``; None without a grammar."""
        if self.grammar is None:
            return None
        mask = self.grammar.mask()
        if not mask.any():
            self.misfit = "no token of the vocabulary goes on in the grammar"
        return mask

    def bias(self, position: int) -> dict[int, float]:
        """Additions to the logits of the token at ``position``."""
        if position - self._start.num_prompt + 1 >= self.sampling.min_tokens:
            return self._bias
        if self.grammar is not None and self.grammar.only_stops(self.grammar.mask()):
            return self._bias
        return self._bias | dict.fromkeys(self._stops, -math.inf)

    def _enter_grammar(self, grammar: Grammar, grammars: CompiledGrammars, eos_token_ids: tuple[int, ...]) -> None:
        stops = tuple(dict.fromkeys(self.sampling.stop_token_ids + eos_token_ids))
        self.grammar = grammars.begin(grammar, stops)
        for index, token in enumerate(self._start.tokens[self._start.num_prompt :]):
            if not self.grammar.accept(token):
                self.misfit = f"generated_ids[{index}] does not go on in the grammar"
                return


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
        penalties=_penalties(rows, logits.shape[1], device),
        bias=_bias(rows, device),
        allowed=_allowed(rows, logits.shape[1], device),
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


def _penalties(rows: Sequence[Row], vocab_size: int, device: torch.device) -> Penalties | None:
    penalised = [index for index, row in enumerate(rows) if row.sequence.penalises]
    if not penalised:
        return None
    slots = [-1] * len(rows)
    for slot, index in enumerate(penalised):
        slots[index] = slot
    samplings = [row.sequence.sampling for row in rows]
    return Penalties(
        slots=_ints(slots, device, torch.int32),
        repetition=_floats([sampling.repetition_penalty for sampling in samplings], device),
        presence=_floats([sampling.presence_penalty for sampling in samplings], device),
        frequency=_floats([sampling.frequency_penalty for sampling in samplings], device),
        seen=torch.stack([rows[index].sequence.seen(vocab_size, device) for index in penalised]),
    )


def _bias(rows: Sequence[Row], device: torch.device) -> LogitBias | None:
    of_rows = [row.sequence.bias(row.position) for row in rows]
    entries = [entry for bias in of_rows for entry in bias.items()]
    if not entries:
        return None
    token_ids, values = zip(*entries, strict=True)
    return LogitBias(
        _ints([0, *itertools.accumulate(len(bias) for bias in of_rows)], device, torch.int32),
        _ints(list(token_ids), device, torch.int32),
        _floats(list(values), device),
    )


def _allowed(rows: Sequence[Row], vocab_size: int, device: torch.device) -> Tensor | None:
    masks = {index: mask for index, row in enumerate(rows) if (mask := row.sequence.allowed()) is not None}
    if not masks:
        return None
    allowed = torch.full((len(rows), -(-vocab_size // 32)), -1, dtype=torch.int32)
    for index, mask in masks.items():
        allowed[index] = mask[0]
    return allowed.to(device, non_blocking=True)


def _signed(seed: int) -> int:
    """The bits of an unsigned 64-bit seed as a signed integer."""
    seed &= _SEED_MASK
    return seed - (1 << 64) if seed >> 63 else seed


def _floats(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)


def _ints(values: list[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
