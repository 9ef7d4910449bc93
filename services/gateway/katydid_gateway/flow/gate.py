"""The gate between requests and engines: open while some engine has little waiting, else requests queue here, fairly.

Work that waits in the gateway can still be reordered, shed and sent wherever a cache turns warm; work that waits in an
engine cannot. So engines get just enough to stay busy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from katydid_runtime.errors import OverloadedError

from katydid_gateway.flow.fair_queue import FairQueue, Ticket

__all__ = ["Gate"]

# Engines report with every step; between reports the gate looks for itself.
_LOOK_S = 0.01


class Gate:
    """`room()` says whether an engine can take one more request; `speed()` is all engines' prompt tokens a second."""

    def __init__(self, room: Callable[[], bool], speed: Callable[[], float], max_queued: int) -> None:
        self.queue = FairQueue()
        self._room = room
        self._speed = speed
        self._max_queued = max_queued
        self._turns: dict[Ticket, asyncio.Future[None]] = {}
        self._passing = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def open(self) -> bool:
        """Whether a request that comes now need not wait."""
        return not self._passing and not self.queue and self._room()

    def wait_s(self, ticket: Ticket) -> float:
        """How long a ticket that comes now would wait, by what is before it."""
        speed = self._speed()
        return self.queue.ahead(ticket) / speed if speed > 0 else 0.0

    @asynccontextmanager
    async def turn(self, ticket: Ticket) -> AsyncIterator[None]:
        """Wait for the ticket's turn; within the block the request is sent, and counts as the engine's afterwards.

        Raises OverloadedError when too many wait already, or when its place is needed by one that comes before it.
        """
        if not self.open:
            if len(self.queue) >= self._max_queued:
                self._make_room(ticket)
            await self._wait(ticket)
        self._passing = True
        try:
            yield
        finally:
            self._passing = False
            self._look()

    def _make_room(self, newcomer: Ticket) -> None:
        displaced = self.queue.displaced_by(newcomer)
        error = OverloadedError(
            f"{len(self.queue)} requests wait for an engine, the most that may",
            retry_after_s=max(1.0, self.wait_s(displaced or newcomer)),
        )
        if displaced is None:
            raise error
        self.queue.remove(displaced)
        # Who is just being cancelled leaves anyway.
        if not self._turns[displaced].done():
            self._turns[displaced].set_exception(error)

    async def _wait(self, ticket: Ticket) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._turns[ticket] = turn
        self.queue.push(ticket)
        self._look()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # Its turn came while it was leaving: the next one has it.
                self._passing = False
            raise
        finally:
            del self._turns[ticket]
            self.queue.remove(ticket)
            if not self._passing:
                self._look()

    def _look(self) -> None:
        """Give the next request its turn if there is room; while some wait, look again soon."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._passing and self.queue and self._room():
            # The turn is taken until the request has been sent, so that two do not see the same room. Who is just being
            # cancelled gets none.
            while not self._passing and (ticket := self.queue.pop(time.monotonic())) is not None:
                if not self._turns[ticket].done():
                    self._passing = True
                    self._turns[ticket].set_result(None)
        if self.queue and not self._passing:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)
