"""What sampling must remember of one sequence: its parameters, what bans tokens for it, and its place in a grammar."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Sequence

from torch import Tensor

from katydid_engine.compiled_grammars import CompiledGrammars
from katydid_engine.grammar import Grammar, GrammarError
from katydid_engine.grammar_state import GrammarState
from katydid_engine.plan import Start

__all__ = ["Limits", "SequenceSampler"]

Limits = tuple[dict[int, float], Tensor | None]
"""Of one token to come: additions to the logits, -inf bans a token; and what a grammar allows, int32 ``[1, words]``."""

# Ambiguous grammars take longer with every token, and everybody waits for them.
_PATIENCE_S = 0.5


class SequenceSampler:
    """``misfit`` says why its grammar has no way on; empty while it has."""

    def __init__(self, start: Start, eos_token_ids: tuple[int, ...], grammars: CompiledGrammars | None = None) -> None:
        self.id = start.sequence
        self.sampling = start.sampling
        self.start = start
        self.misfit = ""
        self._grammar: GrammarState | None = None
        self._stops = start.sampling.stop_token_ids + (() if start.sampling.ignore_eos else eos_token_ids)
        self._bias = dict(start.sampling.logit_bias)
        if start.sampling.grammar is not None and grammars is not None:
            self._enter_grammar(start.sampling.grammar, grammars, eos_token_ids)

    @property
    def penalises(self) -> bool:
        sampling = self.sampling
        return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def needs_host(self) -> bool:
        """Whether what it asks for depends on its tokens so far, which a device may know before the host does."""
        return self._grammar is not None or self.sampling.min_tokens > 0

    @property
    def plain(self) -> bool:
        """Whether it asks for nothing beyond temperature, filters and a seed: the same on all ranks."""
        sampling = self.sampling
        limited = sampling.grammar is not None or sampling.min_tokens > 0 or sampling.logprobs is not None
        return not (limited or self.penalises or self._bias)

    @property
    def most_biases(self) -> int:
        """Most additions to the logits of one token; the same on all ranks."""
        return len(self._bias) + (len(self._stops) if self.sampling.min_tokens else 0)

    def limits(self, position: int, drafts: Sequence[int]) -> list[Limits]:
        """For the token at ``position`` and for the one behind each of ``drafts`` that follow it. (``position`` is used
        only where ``needs_host``.)"""
        masks = self._masks(drafts)
        return [(self._bias_at(position + place, mask), mask) for place, mask in enumerate(masks)]

    def accept(self, tokens: array[int]) -> tuple[array[int], bool]:
        """Goes on by its own new tokens; returns them as far as its grammar goes, and whether that ends there."""
        if self._grammar is None:
            return tokens, False
        for place, token in enumerate(tokens):
            if not self._grammar.accept(token):
                self.misfit = self.misfit or "no token of the vocabulary goes on in the grammar"
                return tokens, False
            if self._grammar.ended:
                return tokens[: place + 1], True
        return tokens, False

    def would_end(self, token: int) -> bool:
        """Whether the grammar would end with this token: another choice's."""
        if self._grammar is None or not self._grammar.accept(token):
            return False
        ended = self._grammar.ended
        self._grammar.rollback(1)
        return ended

    def _masks(self, drafts: Sequence[int]) -> list[Tensor | None]:
        if self._grammar is None:
            return [None] * (1 + len(drafts))
        started = time.thread_time()
        mask = self._grammar.mask()
        masks: list[Tensor | None] = [mask]
        if not mask.any():
            self.misfit = self.misfit or "no token of the vocabulary goes on in the grammar"
        accepted = 0
        for draft in drafts:
            # Asked of the mask first: the library writes a warning for each special token that it is given and refuses.
            if not self._grammar.allows(mask, draft) or not self._grammar.accept(draft):
                break
            accepted += 1
            mask = self._grammar.mask()
            masks.append(mask)
        self._grammar.rollback(accepted)
        if time.thread_time() - started > _PATIENCE_S:
            self.misfit = self.misfit or f"the grammar takes longer than {_PATIENCE_S} s a token"
        # Behind a draft that cannot come nothing is accepted, whatever is sampled there.
        return masks + [None] * (1 + len(drafts) - len(masks))

    def _bias_at(self, position: int, mask: Tensor | None) -> dict[int, float]:
        if self.sampling.min_tokens == 0 or position - self.start.num_prompt + 1 >= self.sampling.min_tokens:
            return self._bias
        if mask is not None and self._grammar is not None and self._grammar.only_stops(mask):
            return self._bias
        return self._bias | dict.fromkeys(self._stops, -math.inf)

    def _enter_grammar(self, grammar: Grammar, grammars: CompiledGrammars, eos_token_ids: tuple[int, ...]) -> None:
        stops = tuple(dict.fromkeys(self.sampling.stop_token_ids + eos_token_ids))
        try:
            self._grammar = grammars.begin(grammar, stops)
        except GrammarError as error:
            # It was checked before; should the two ever disagree, this request ends and no other.
            self.misfit = f"the grammar is refused: {error}"
            return
        for index, token in enumerate(self.start.tokens[self.start.num_prompt :]):
            if not self._grammar.accept(token):
                self.misfit = f"generated_ids[{index}] does not go on in the grammar"
                return
