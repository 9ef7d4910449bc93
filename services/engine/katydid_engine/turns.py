"""One at a time, tenants in turn: who asks for a thousand things waits behind who asks for one."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Turns"]


class Turns:
    """A lock that is handed on from tenant to tenant, in order of their first wait."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def one(self, tenant: bytes) -> AsyncIterator[None]:
        """Waits for its turn, and has it for the block."""
        if self._taken:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._hand_on()
                raise
        self._taken = True
        try:
            yield
        finally:
            self._hand_on()

    def _hand_on(self) -> None:
        self._taken = False
        while self._waiting:
            tenant, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns
            # One that was cancelled waits no more.
            if not turn.done():
                self._taken = True
                turn.set_result(None)
                return
