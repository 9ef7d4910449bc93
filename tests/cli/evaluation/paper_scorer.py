"""Scorers without a model: every answer is known in advance, so a task's own arithmetic can be checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from katydid_cli.evaluation.scorer import Continuation, Scores


class PaperScorer:
    """Tokens score what `logprob` and `greedy` say, prompts get `continuation`; `asked` is what was asked."""

    def __init__(
        self,
        *,
        vocabulary: int = 4096,
        max_length: int = 16384,
        logprob: Callable[[Sequence[int], int], float] = lambda ids, at: -1.0,
        greedy: Callable[[Sequence[int], int], bool] = lambda ids, at: True,
        continuation: Callable[[Sequence[int]], Continuation] = lambda ids: Continuation([]),
        drafts: bool = True,
    ) -> None:
        self.vocabulary, self.max_length, self.drafts = vocabulary, max_length, drafts
        self._logprob, self._greedy, self._continuation = logprob, greedy, continuation
        self.asked: list[list[int]] = []

    def score(self, ids: Sequence[int]) -> Scores:
        self.asked.append(list(ids))
        places = range(1, len(ids))
        return Scores([self._logprob(ids, i) for i in places], [self._greedy(ids, i) for i in places])

    def score_many(self, sequences: Sequence[Sequence[int]]) -> list[Scores]:
        return [self.score(ids) for ids in sequences]

    def generate(
        self, ids: Sequence[int], max_tokens: int, stop: Sequence[int] = (), draft_depth: int = 0
    ) -> Continuation:
        self.asked.append(list(ids))
        return self._continuation(ids)
