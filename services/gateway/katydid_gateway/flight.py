"""One submission under way: the engine that has it, and which choices of the answer it computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from katydid_runtime.errors import KatydidError

from katydid_gateway.dispatch import Dispatch, Follower
from katydid_gateway.engines.frames import RequestStep

__all__ = ["Flight", "FlightListener", "Part"]


@dataclass(frozen=True, slots=True)
class Part:
    """A choice to be continued by itself, after `generated` (packed little-endian uint32, maybe none)."""

    choice: int
    generated: bytes


class FlightListener(Protocol):
    """Who gets what the engine says."""

    def on_step(self, flight: Flight, step: RequestStep, arrived_ns: int) -> None: ...

    def on_lost(self, flight: Flight, error: KatydidError) -> None: ...


@dataclass(eq=False, slots=True)
class Flight:
    """All choices of a request at first; behind what was said on another engine, one choice each (`part` is set).

    `choices[i]` is the answer's number of the engine's choice i; `attempt` counts the engines they were sent to.
    `dispatch` is None before it is sent and after its end. With `hands_off` its engine computes the prompt and first
    tokens alone, which a `follower` fetches meanwhile; `giver` is the engine that did so for a part, "" where an engine
    was lost.
    """

    listener: FlightListener
    choices: Sequence[int]
    part: Part | None = None
    attempt: int = 1
    giver: str = ""
    hands_off: bool = False
    dispatch: Dispatch | None = None
    follower: Follower | None = None
    running: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self.running = set(self.choices)

    def on_step(self, step: RequestStep, arrived_ns: int) -> bool:
        """See EngineListener."""
        if self.dispatch is not None:
            self.listener.on_step(self, step, arrived_ns)
        return self.dispatch is None

    def on_lost(self, error: KatydidError) -> None:
        """See EngineListener."""
        if self.dispatch is not None:
            self.listener.on_lost(self, error)
