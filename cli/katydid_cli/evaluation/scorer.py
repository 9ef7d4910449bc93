"""What an evaluation needs of a model: scores of given tokens, greedy continuations, and how its drafts fared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class EvaluationError(Exception):
    """An evaluation cannot be made; the message names what is wrong and what is allowed."""


class VocabularyMismatchError(EvaluationError):
    """The model and the tokenizer of the evaluation have different vocabularies."""


class MissingDataError(EvaluationError):
    """Held-out text that a task needs is not on this machine."""


@dataclass(frozen=True)
class Scored:
    """For each id after the first: its natural log probability, and whether it was the model's first choice."""

    logprobs: list[float]
    greedy: list[bool]


@dataclass(frozen=True)
class Drafting:
    """Of `steps` draft chains, `accepted[d]` had at least d + 1 accepted tokens."""

    steps: int = 0
    accepted: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Generated:
    """A greedy continuation (without the stop token) and, where drafting was on, its acceptance."""

    ids: list[int]
    drafting: Drafting = field(default_factory=Drafting)


class Scorer(Protocol):
    """One model in one engine configuration.

    `vocabulary` is the number of token ids, `max_length` the longest sequence. `score` takes 2 ids at least. `generate`
    continues greedily until `max_tokens` or a stop id; with `draft_depth` > 0 it also counts acceptance up to that depth
    and raises EvaluationError where the model has no draft layer.
    """

    vocabulary: int
    max_length: int

    def score(self, ids: Sequence[int]) -> Scored: ...

    def generate(
        self, ids: Sequence[int], max_tokens: int, stop: Sequence[int] = (), draft_depth: int = 0
    ) -> Generated: ...
