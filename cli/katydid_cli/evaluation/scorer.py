"""What an evaluation needs of a model: scores of given tokens, greedy continuations, and how its drafts fared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from katydid_runtime.errors import InvalidRequestError

__all__ = [
    "Continuation",
    "EvaluationError",
    "Generated",
    "MissingDataError",
    "Scored",
    "Scorer",
    "Scores",
    "VocabularyMismatchError",
]


class EvaluationError(InvalidRequestError):
    """An evaluation cannot be made; the message names what is wrong and what is allowed."""


class VocabularyMismatchError(EvaluationError):
    """The model and the tokenizer of the evaluation have different vocabularies."""


class MissingDataError(EvaluationError):
    """Held-out text that a task needs is not on this machine."""


class Scored(Protocol):
    """For each id after the first: its natural log probability, and whether it was the model's first choice."""

    @property
    def logprobs(self) -> list[float]: ...

    @property
    def greedy(self) -> list[bool]: ...


class Generated(Protocol):
    """A greedy continuation without its stop token.

    Of `steps` draft chains, accepted[d] had d + 1 right tokens or more.
    """

    @property
    def ids(self) -> list[int]: ...

    @property
    def steps(self) -> int: ...

    @property
    def accepted(self) -> list[int]: ...


@dataclass(frozen=True)
class Scores:
    """A plain Scored."""

    logprobs: list[float]
    greedy: list[bool]


@dataclass(frozen=True)
class Continuation:
    """A plain Generated."""

    ids: list[int]
    steps: int = 0
    accepted: list[int] = field(default_factory=list)


class Scorer(Protocol):
    """One model in one engine configuration.

    `vocabulary` is the number of token ids, `max_length` the longest sequence. `score` takes 2 ids at least;
    `score_many` does the same for several sequences, which may begin alike. `generate`
    continues greedily until `max_tokens` or a stop id; with `draft_depth` > 0 it also counts acceptance up to that
    depth and raises KatydidError where the model has no draft layer. `drafts` says whether it can.
    """

    vocabulary: int
    max_length: int
    drafts: bool

    def score(self, ids: Sequence[int]) -> Scored: ...

    def score_many(self, sequences: Sequence[Sequence[int]]) -> Sequence[Scored]: ...

    def generate(
        self, ids: Sequence[int], max_tokens: int, stop: Sequence[int] = (), draft_depth: int = 0
    ) -> Generated: ...
