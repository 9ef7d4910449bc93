"""Follows the block events of every instance of the cache service, and those that join and leave."""

from __future__ import annotations

import asyncio

from katydid_cache.instances import Instances
from katydid_runtime.bearer import interceptors
from katydid_runtime.channel import open_channel
from katydid_runtime.tls import Tls

from katydid_gateway.engines.block_events import follow_cache
from katydid_gateway.routing.tier_index import TierIndex

__all__ = ["CacheInstances"]

LOOK_S = 1.0


class CacheInstances:
    """`source` names the instances: HOST:PORT,..., unix:/path, dns:NAME:PORT or file:PATH. Raises SettingsError."""

    def __init__(self, source: str, tiers: TierIndex, *, tls: Tls | None, token: str | None) -> None:
        self._instances = Instances(source)
        self._tiers = tiers
        self._tls = tls
        self._token = token
        self._watches: dict[str, asyncio.Task[None]] = {}

    @property
    def watched(self) -> frozenset[str]:
        """Addresses of the instances it follows."""
        return frozenset(self._watches)

    async def follow(self, identity: bytes) -> None:
        """Keep the tier index in step with one namespace of all of them, until cancelled."""
        watches = self._watches = {}
        refreshing = asyncio.create_task(self._instances.follow())
        try:
            while True:
                for gone in watches.keys() - set(self._instances.addresses):
                    watches.pop(gone).cancel()
                for address in self._instances.addresses:
                    if address not in watches:
                        watches[address] = asyncio.create_task(self._watch(identity, address))
                await asyncio.sleep(LOOK_S)
        finally:
            tasks = [refreshing, *watches.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, identity: bytes, address: str) -> None:
        async with open_channel(address, self._tls, interceptors=interceptors(self._token)) as channel:
            await follow_cache(identity, address, channel, self._tiers)
