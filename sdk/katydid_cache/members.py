"""The instances a fleet's client talks to: who is there, who can be asked, and what is on its way to each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from katydid_runtime.errors import KatydidError

from katydid_cache.client import CacheClient
from katydid_cache.instances import Instances
from katydid_cache.layout import BlockLayout

__all__ = ["Member", "Members"]

_HEDGE_S = (0.02, 0.25)
_SMOOTHING = 0.2
_LOOK_S = 0.25
_UNSETTLED_S = 600.0

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Member:
    """One instance: its client, its load (bytes on their way to and from it), and how long its lookups take of late."""

    name: str
    client: CacheClient
    load: float = 0.0
    lookup_s: float = 0.005

    @contextlib.contextmanager
    def carrying(self, size: int) -> Iterator[None]:
        """`size` bytes are on their way meanwhile."""
        self.load += size
        try:
            yield
        finally:
            self.load -= size

    def took(self, lookup_s: float) -> None:
        """A lookup was answered after this time."""
        self.lookup_s += _SMOOTHING * (lookup_s - self.lookup_s)

    @property
    def hedge_s(self) -> float:
        """When not to wait any longer for a lookup alone."""
        return min(max(4 * self.lookup_s, _HEDGE_S[0]), _HEDGE_S[1])


class Members:
    """The members that `instances` names, each attached with a client of `new_client`. Belongs to one event loop."""

    def __init__(self, instances: Instances, new_client: Callable[[str], CacheClient]) -> None:
        self._instances = instances
        self._new_client = new_client
        self._members: dict[str, Member] = {}
        self._usable: frozenset[str] = frozenset()
        self._unsettled_until = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def get(self, name: str) -> Member | None:
        """The member; None when it has left."""
        return self._members.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._members)

    @property
    def usable(self) -> list[str]:
        """Those that can be asked now."""
        return [name for name, member in self._members.items() if member.client.attached]

    @property
    def unsettled(self) -> bool:
        """Whether blocks may still be where they were placed before an instance joined, left, went away or returned."""
        return time.monotonic() < self._unsettled_until

    def loads(self) -> dict[str, float]:
        """Bytes on their way, by member."""
        return {name: member.load for name, member in self._members.items()}

    async def attach(self, identity: bytes, layout: BlockLayout, timeout_s: float) -> bool:
        """Join at all members, now and later; whether any answered. Raises IdentityMismatchError."""
        await self._instances.refresh()
        answers = await asyncio.gather(
            *(self._join(name, identity, layout, timeout_s) for name in self._instances.addresses)
        )
        self._usable = frozenset(self.usable)
        self._unsettled_until = time.monotonic() + _UNSETTLED_S  # who knows what was before
        self._tasks = [
            asyncio.create_task(self._instances.follow()),
            asyncio.create_task(self._follow(identity, layout)),
        ]
        return any(answers)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.each(lambda client: client.close())

    async def each(self, call: Callable[[CacheClient], Awaitable[None]]) -> None:
        await asyncio.gather(*(call(member.client) for member in self._members.values()))

    async def _join(self, name: str, identity: bytes, layout: BlockLayout, timeout_s: float) -> bool:
        member = self._members[name] = Member(name, self._new_client(name))
        return await member.client.attach(identity, layout, timeout_s=timeout_s)

    async def _follow(self, identity: bytes, layout: BlockLayout) -> None:
        """Take up who joins, let go who leaves, and note who comes and goes, until cancelled."""
        while True:
            addresses = self._instances.addresses
            for name in [name for name in self._members if name not in addresses]:
                logger.info("cache instance %s has left", name)
                await asyncio.gather(self._members.pop(name).client.close(), return_exceptions=True)
            for name in [name for name in addresses if name not in self._members]:
                logger.info("cache instance %s has joined", name)
                try:
                    await self._join(name, identity, layout, 0.0)
                except KatydidError as error:
                    logger.error("cache instance %s is of no use: %s", name, error)
            usable = frozenset(self.usable)
            if usable != self._usable:
                self._usable = usable
                self._unsettled_until = time.monotonic() + _UNSETTLED_S
            await asyncio.sleep(_LOOK_S)
