"""How many prompt tokens a step may compute beside decodes, so that these keep their pace while a long prompt comes.

What steps take is learnt from them (``step_cost.py``). With a target for the time between a row's tokens, a prompt gets
what is left of it; a row that drafts yields several tokens a step, so its steps may take longer.
"""

from __future__ import annotations

from collections.abc import Sequence

from katydid_runtime.block_hash import BLOCK_TOKENS

from katydid_engine.plan import StepPlan
from katydid_engine.step_cost import StepCost

__all__ = ["TokenBudget", "deal_chunks"]


class TokenBudget:
    """``target_s`` is the time a row may wait for a token; None for no limit. ``least`` prompt tokens go into a step in
    any case, so that a prompt comes to its end on a machine that is too slow for the target. With ``sizes`` it is one
    of these, for which steps are prepared, or at least twice the largest; with ``sparse_sizes`` likewise of prompts
    that are computed sparsely. Steps without decodes are prepared for ``alone_sizes``, too, which are larger."""

    def __init__(
        self,
        target_s: float | None,
        least: int,
        sizes: Sequence[int] = (),
        sparse_sizes: Sequence[int] = (),
        *,
        alone_sizes: Sequence[int] = (),
    ) -> None:
        self.target_s = target_s
        self._least = least
        self._dense, self._sparse = _Steps(sizes, alone_sizes), _Steps(sparse_sizes)

    def prompt_tokens(self, seconds: float, context: float = 0, sparse: bool = False) -> int:
        """Prompt tokens behind ``context`` for a step beside decodes that may take so long."""
        steps = self._sparse if sparse else self._dense
        if sparse and not steps.sizes:
            # Launched op by op, their least step is long: they take as much again for their tokens.
            seconds = max(seconds, 2 * steps.others.least_s)
        return steps.tokens(seconds, context, self._least)

    def step_s(self, tokens: int, context: float, sparse: bool = False, *, beside: bool = True) -> float:
        """Seconds of a step with so many tokens of one prompt, ``beside`` decodes or not."""
        return self._seconds(tokens, tokens, context, sparse, beside)

    def prompt_s(self, tokens: int, context: float, step_s: float, sparse: bool = False) -> float:
        """Seconds until so many tokens of a prompt are computed beside decodes, in steps that take no longer than
        ``step_s``. ``context`` stands before them, or as much as makes the pairs as many as there are."""
        chunk = self.prompt_tokens(step_s, context + tokens / 2, sparse)
        return self._seconds(chunk, tokens, context, sparse, True, steps=max(1.0, tokens / chunk))

    def took(self, plan: StepPlan, seconds: float) -> None:
        """A step with prompt tokens has taken so long."""
        tokens, prompts = plan.num_prefill_tokens, len(plan.runs) - plan.num_decodes
        steps = self._sparse if plan.sparse else self._dense
        pairs = plan.sparse_pairs if plan.sparse else plan.num_prefill_pairs
        steps.cost(tokens, bool(plan.num_decodes), alone=prompts == 1).took(tokens, pairs, seconds)

    def _seconds(
        self, chunk: int, tokens: int, context: float, sparse: bool, beside: bool, steps: float = 1.0
    ) -> float:
        """Of ``tokens`` in steps of ``chunk``."""
        of_kind = self._sparse if sparse else self._dense
        cost = of_kind.cost(chunk, beside)
        seconds = cost.seconds(tokens, context, steps)
        if cost is of_kind.others:
            seconds = max(seconds, of_kind.prepared.seconds(tokens, context, steps))
        return seconds


class _Steps:
    """Of one kind of prompt. A host that launches op by op may take longer than the device, so prepared steps have
    costs of their own, beside decodes and without. Where the host is the slower, the others' times tell nothing of what
    their pairs cost: no step is taken to be shorter than a prepared one of as many tokens would be."""

    def __init__(self, sizes: Sequence[int], alone_sizes: Sequence[int] = ()) -> None:
        self.sizes = sorted(sizes)
        self._most = {beside: max((*sizes, *(() if beside else alone_sizes)), default=0) for beside in (False, True)}
        self.prepared, self.without, self.others = StepCost(), StepCost(), StepCost()

    def cost(self, tokens: int, beside: bool, alone: bool = True) -> StepCost:
        """Of steps with so many tokens of prompts, ``beside`` decodes or not, of one prompt ``alone`` or several."""
        if not (alone and tokens <= self._most[beside]):
            return self.others
        return self.prepared if beside else self.without

    def tokens(self, seconds: float, context: float, least: int) -> int:
        """As many as a step beside decodes may compute in that time."""
        others = self.others.tokens(seconds, context)
        if not self.sizes:
            return max(least, others)
        prepared = self.prepared.tokens(seconds, context)
        others = max(least, min(others, prepared) if self.prepared else others)
        if others >= 2 * self.sizes[-1]:
            return others
        fitting = (size for size in reversed(self.sizes) if self.prepared.most_s(size, context) <= seconds)
        chosen = next(fitting, self.sizes[0]) if self.prepared else self.sizes[0]
        if chosen == self.prepared.only_size and self.prepared.seconds(chosen, context) <= seconds:
            # A larger one is tried once: it may take no longer.
            return min((size for size in self.sizes if size > chosen), default=chosen)
        return chosen


def deal_chunks(wanted: Sequence[int], budget: int) -> list[int]:
    """Tokens for each prompt that wants so many: half of what is left for each in order, then the rest in order, so
    that a long one leaves room to a short newcomer."""
    least = max(1, min(BLOCK_TOKENS, budget // 2))
    chunks = []
    for tokens in wanted:
        chunks.append(min(tokens, max(budget // 2, least), budget))
        budget -= chunks[-1]
    for index, tokens in enumerate(wanted):
        more = min(tokens - chunks[index], budget)
        chunks[index] += more
        budget -= more
    return chunks
