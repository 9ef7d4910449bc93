"""What a step computes of the prompts on their way, beside its decodes: which of them, and how many of its tokens.

With no targets every prompt gets a share of a step's tokens. With a target for the time between tokens, and with one
for the time to the first, a step beside decodes belongs to one prompt (``prompt_order.py``), and takes no longer than a
row may wait for its token (``token_budget.py``). Where prompts would be late at that pace, but not at a faster one,
rows wait longer for once, out of what they have been faster than their target, and will be: a row's mean is what
counts, and few answers end with the next tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Several

from katydid_engine.prompt_order import Due, in_time, in_turn, next_prompt
from katydid_engine.request import Sequence
from katydid_engine.sparse_prefill import SparsePrefill, before_tail, whole_blocks
from katydid_engine.token_budget import TokenBudget, deal_chunks

__all__ = ["Prefills"]

# Of what rows are ahead of their target one step spends at most; how many targets it takes at most; and how many tokens
# a row is taken to be still good for. It is done for prompts that have more time left than they need by this share.
_SPENT, _LONGEST, _TO_COME = 0.5, 8.0, 40
_SURE = 0.9
_TURNS = 8
# A prompt's work is looked at in pieces of so many tokens, or in so many pieces.
_PIECE, _PIECES = 16_384, 4


class Prefills:
    """``ttft_s`` is the target of the time from a request's receipt to its first token; None for none. Prompts that may
    be computed sparsely are as ``sparse`` says."""

    def __init__(self, budget: TokenBudget, ttft_s: float | None, sparse: SparsePrefill | None = None) -> None:
        self._budget = budget
        self._ttft_s = ttft_s
        self._sparse = sparse

    @property
    def by_time(self) -> bool:
        """Whether it matters what steps take."""
        return self._ttft_s is not None or self._budget.target_s is not None

    def choose(
        self, prompts: Several[Sequence], decodes: Several[Sequence], most: int, yields: float, now: float, turn: int
    ) -> list[int]:
        """How many tokens of each prompt, ``most`` in all, in the step number ``turn``; decodes yield so many tokens
        a row and step."""
        chunks = self._deal(prompts, decodes, most, yields, now, turn)
        return [self._cut(prompt, chunk, bool(decodes)) for prompt, chunk in zip(prompts, chunks, strict=True)]

    def _cut(self, prompt: Sequence, chunk: int, beside: bool) -> int:
        """Of a sparse prompt, a chunk that is not its last ends where a block of the selection does; ``beside`` decodes
        its last blocks have a step of their own."""
        if self._sparse is None or not self.sparse(prompt):
            return chunk
        if beside and prompt.num_scheduled < prompt.num_prompt:
            chunk = before_tail(prompt.num_scheduled, chunk, prompt.num_prompt, self._sparse)
        return whole_blocks(prompt.num_scheduled, chunk) if chunk < prompt.num_unscheduled else chunk

    def _deal(
        self, prompts: Several[Sequence], decodes: Several[Sequence], most: int, yields: float, now: float, turn: int
    ) -> list[int]:
        wanted = [sequence.num_unscheduled for sequence in prompts]
        target_s = self._budget.target_s if decodes else None
        if not prompts or (target_s is None and self._ttft_s is None):
            return deal_chunks(wanted, most)
        # Those of lower priority have a turn now and then.
        first = prompts[0].request.priority
        served = [sequence for sequence in prompts if turn % _TURNS == 0 or sequence.request.priority == first]
        if target_s is None:
            step_s = self._budget.step_s(most, 0, beside=False)
            chosen = self._next(served, step_s, now, turn)
        else:
            ahead_s = min(_ahead(sequence, target_s, now) for sequence in decodes)
            step_s = self._pace(served, target_s * yields, ahead_s, now)
            chosen = self._next(served, step_s, now, turn)
            context = self._attended(chosen)
            most = min(most, self._budget.prompt_tokens(step_s, context, self.sparse(chosen)))
            took = self._budget.step_s(most, context, self.sparse(chosen))
            if self.sparse(chosen) and ahead_s < took - target_s and turn % _TURNS:
                return [0] * len(wanted)  # rows get ahead first
        chunks = [0] * len(wanted)
        for at in sorted(range(len(wanted)), key=lambda at: prompts[at] is not chosen):
            if target_s is None or prompts[at] is chosen:
                chunks[at] = min(wanted[at], most)
                most -= chunks[at]
        return chunks

    def _pace(self, prompts: Several[Sequence], smooth_s: float, ahead_s: float, now: float) -> float:
        """Seconds that a step may take beside decodes."""
        fast_s = min(_LONGEST * smooth_s, smooth_s + _SPENT * ahead_s)
        if self._ttft_s is None or fast_s <= smooth_s:
            return smooth_s
        smooth, fast = self._dues(prompts, smooth_s, now), self._dues(prompts, fast_s, now)
        surely = [Due(due.work_s, _SURE * due.left_s) for due in fast]
        return fast_s if len(in_time(surely)) > len(in_time(smooth)) else smooth_s

    def _next(self, prompts: Several[Sequence], step_s: float, now: float, turn: int) -> Sequence:
        """The one that a step goes on with, where steps take so long."""
        if self._ttft_s is None:
            return prompts[in_turn(len(prompts), turn)]
        return prompts[next_prompt(self._dues(prompts, step_s, now), turn)]

    def sparse(self, sequence: Sequence) -> bool:
        """Whether its prompt is computed so."""
        options = self._sparse
        return options is not None and sequence.request.sparse_prefill and sequence.num_prompt >= options.min_tokens

    def pairs(self, sequence: Sequence, count: int) -> float:
        """About how many pairs of its next so many tokens and what they attend to there are."""
        return self._pairs(sequence, sequence.num_scheduled, count)

    def _pairs(self, sequence: Sequence, start: int, count: int) -> float:
        if self._sparse is None or not self.sparse(sequence):
            return count * (start + (count + 1) / 2)
        return self._sparse.pairs(start, count, sequence.num_prompt)

    def _attended(self, sequence: Sequence) -> float:
        """Tokens that its next one attends to."""
        if self._sparse is None or not self.sparse(sequence):
            return sequence.num_scheduled
        return self._sparse.attended(sequence.num_scheduled, sequence.num_prompt)

    def _dues(self, prompts: Several[Sequence], step_s: float, now: float) -> list[Due]:
        assert self._ttft_s is not None
        return [
            Due(self._work_s(sequence, step_s), sequence.request.received_at + self._ttft_s - now)
            for sequence in prompts
        ]

    def _work_s(self, sequence: Sequence, step_s: float) -> float:
        """Summed over pieces: steps have fewer tokens the more stands before these, and the last blocks of a sparse
        prompt attend to more than all before them."""
        start, end, sparse = sequence.num_scheduled, sequence.num_tokens, self.sparse(sequence)
        borders = {end, *range(start, end, max(_PIECE, -(-(end - start) // _PIECES)))}
        if self._sparse is not None and sparse:
            borders.add(min(max(start, self._sparse.tail(sequence.num_prompt)), end))
        seconds = 0.0
        for first, last in itertools.pairwise(sorted(borders)):
            count = last - first
            context = self._pairs(sequence, first, count) / count - (count + 1) / 2
            seconds += self._budget.prompt_s(count, context, step_s, sparse)
        return seconds


def _ahead(sequence: Sequence, target_s: float, now: float) -> float:
    """Seconds by which a row's tokens have come earlier than its target asks, or may come later for a while."""
    first = sequence.live.first_token_at
    return 0.0 if first is None else target_s * (sequence.num_new_output - 1 + _TO_COME) - (now - first)
