"""What is asked, and when: sessions of one or more turns, described before the first request is sent.

A prompt is a sequence of pieces, each a key and a length; `TokenSource` turns equal pieces into equal token ids. So a
shared system prompt, a growing conversation and a block of a published trace are all the same thing: a key that occurs
again, and a workload of a hundred million tokens fits into memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

__all__ = [
    "Piece",
    "Session",
    "TokenSource",
    "Turn",
    "constant_arrivals",
    "multi_turn",
    "poisson_arrivals",
    "random_prompts",
    "shared_prefix",
]


@dataclass(frozen=True, slots=True)
class Piece:
    """`tokens` ids that depend on `key` alone; a longer piece of the same key begins with the shorter one."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn adds to the conversation, how many tokens it asks for, and the pause before it is sent."""

    pieces: tuple[Piece, ...]
    output_tokens: int
    think_s: float = 0.0

    @property
    def input_tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow each other from `start_s`; each prompt is the whole conversation so far, answers included."""

    start_s: float
    turns: tuple[Turn, ...]


class TokenSource:
    """Token ids of pieces, drawn from ids that the model's own tokenizer produces."""

    def __init__(self, pool: Sequence[int], seed: int) -> None:
        if not pool:
            raise ValueError("the pool of token ids is empty")
        self._pool = tuple(pool)
        self._seed = seed

    def ids(self, pieces: Iterable[Piece]) -> list[int]:
        """The ids of all pieces one after another."""
        ids: list[int] = []
        for piece in pieces:
            ids += random.Random(f"{self._seed}/{piece.key}").choices(self._pool, k=piece.tokens)
        return ids


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Seconds at which requests arrive, `rate` a second on average, independent of each other."""
    rng, now = random.Random(seed), 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def constant_arrivals(rate: float) -> Iterator[float]:
    """Seconds at which requests arrive, one every 1/rate."""
    return (index / rate for index in count())


def random_prompts(arrivals: Iterable[float], requests: int, input_tokens: int, output_tokens: int) -> list[Session]:
    """Prompts that share nothing: no cache can help."""
    return [
        Session(start, (Turn((Piece(f"random-{index}", input_tokens),), output_tokens),))
        for index, start in enumerate(islice(arrivals, requests))
    ]


def shared_prefix(
    arrivals: Iterable[float],
    requests: int,
    input_tokens: int,
    output_tokens: int,
    *,
    shared_tokens: int,
    groups: int,
) -> list[Session]:
    """Prompts of which the first `shared_tokens` are those of one of `groups` system prompts, taken in turn."""
    own_tokens = max(1, input_tokens - shared_tokens)
    return [
        Session(
            start,
            (
                Turn(
                    (Piece(f"system-{index % groups}", shared_tokens), Piece(f"own-{index}", own_tokens)), output_tokens
                ),
            ),
        )
        for index, start in enumerate(islice(arrivals, requests))
    ]


def multi_turn(
    arrivals: Iterable[float],
    requests: int,
    input_tokens: int,
    output_tokens: int,
    *,
    turns: int,
    think_s: float,
) -> list[Session]:
    """Conversations of `turns` turns, each adding `input_tokens`: agents, most of whose prompt was seen before.

    `arrivals` are those of conversations; within one, a turn follows the answer before it after `think_s`.
    """
    conversations = -(-requests // turns)
    sessions = []
    for index, start in enumerate(islice(arrivals, conversations)):
        length = min(turns, requests - index * turns)
        sessions.append(
            Session(
                start,
                tuple(
                    Turn((Piece(f"talk-{index}-{turn}", input_tokens),), output_tokens, think_s if turn else 0.0)
                    for turn in range(length)
                ),
            )
        )
    return sessions
