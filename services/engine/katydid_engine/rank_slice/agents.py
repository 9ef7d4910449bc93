"""Agents at work, as a stream of requests: long prompts that grow turn by turn, short answers, pauses for tools.

A session's prompts are drawn log-normal and asked in order of length: each is the one before, then its answer, then
what the agent has read since. So prompts as a whole are log-normal, and most of each was seen before: four fifths of
all tokens.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

__all__ = ["AgentTraffic", "Agents", "Session", "Turn"]


@dataclass(frozen=True, slots=True)
class AgentTraffic:
    """What agents ask; lengths in tokens, times in seconds.

    Attributes:
        sessions_per_s: sessions that begin.
        turns: of a session, mean; at least one.
        prompt_mean, prompt_most, prompt_spread: of log-normal prompts; the spread is of their logarithms, and the mean
            becomes 68K by cutting the longest.
        output_mean, output_most, output_spread: likewise of answers.
        shared_tokens: of a system prompt, at the head of every prompt of a group.
        groups: number of system prompts.
        pause_s: between an answer and the next turn, mean of an exponential.
        vocabulary: ids are drawn below it.
    """

    sessions_per_s: float
    turns: float = 8.0
    prompt_mean: int = 70_800
    prompt_most: int = 192 * 1024
    prompt_spread: float = 0.6
    output_mean: int = 900
    output_most: int = 64 * 1024
    output_spread: float = 1.0
    shared_tokens: int = 8192
    groups: int = 4
    pause_s: float = 8.0
    vocabulary: int = 100_000


@dataclass(slots=True)
class Turn:
    """One request: ``prompt_tokens`` in all, of which what is not known yet is drawn when it is asked."""

    prompt_tokens: int
    output_tokens: int
    pause_s: float


class Session:
    """One agent's conversation.

    Attributes:
        begins_at: of its first turn.
    """

    def __init__(self, number: int, begins_at: float, turns: list[Turn], head: array[int], vocabulary: int) -> None:
        self.number = number
        self.begins_at = begins_at
        self._turns = turns
        self._tokens = head[:]
        self._random = random.Random(number)
        self._vocabulary = vocabulary

    @property
    def turn(self) -> Turn | None:
        """The next one; None when the session is over."""
        return self._turns[0] if self._turns else None

    def prompt(self) -> array[int]:
        """Of the next turn."""
        missing = self._turns[0].prompt_tokens - len(self._tokens)
        draw = self._random.randbytes(4 * max(1, missing))
        self._tokens.frombytes((np.frombuffer(draw, np.uint32) % np.uint32(self._vocabulary)).tobytes())
        return self._tokens[:]

    def answered(self, tokens: array[int]) -> None:
        """The turn is over: its answer stands in the next prompt."""
        self._tokens.extend(tokens)
        self._turns.pop(0)


class Agents:
    """Sessions in order of their beginnings, the same for a seed."""

    def __init__(self, traffic: AgentTraffic, seed: int = 0) -> None:
        self._traffic = traffic
        self._random = random.Random(seed)
        self._heads = [self._head(group) for group in range(traffic.groups)]

    def sessions(self, until_s: float) -> Iterator[Session]:
        """Those that begin before ``until_s``."""
        traffic, now, number = self._traffic, 0.0, 0
        while (now := now + self._random.expovariate(traffic.sessions_per_s)) < until_s:
            number += 1
            head = self._heads[self._random.randrange(traffic.groups)]
            yield Session(number, now, self._turns(len(head)), head, traffic.vocabulary)

    def _turns(self, least: int) -> list[Turn]:
        traffic = self._traffic
        count = 1 + round(self._random.expovariate(1 / max(1e-9, traffic.turns - 1)))
        lengths = sorted(
            max(least + 1, self._length(traffic.prompt_mean, traffic.prompt_spread, traffic.prompt_most))
            for _ in range(count)
        )
        return [
            Turn(
                length,
                self._length(traffic.output_mean, traffic.output_spread, traffic.output_most),
                self._random.expovariate(1 / traffic.pause_s),
            )
            for length in lengths
        ]

    def _length(self, mean: float, spread: float, most: int) -> int:
        middle = math.log(mean) - spread * spread / 2
        return max(1, min(most, round(self._random.lognormvariate(middle, spread))))

    def _head(self, group: int) -> array[int]:
        draw = random.Random(f"head {group}").randbytes(4 * self._traffic.shared_tokens)
        return array("I", (token % self._traffic.vocabulary for token in array("I", draw)))
