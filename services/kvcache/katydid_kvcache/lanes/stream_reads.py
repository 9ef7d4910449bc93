"""A receiver's reads by stream: clients of other instances, on a loop of their own in a thread beside the orders."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import OrderedDict

import uvloop
from katydid_cache.asking import Asker, asking
from katydid_cache.client import CacheClient
from katydid_runtime.errors import KatydidError
from xxhash import xxh3_128_digest

from katydid_kvcache.lanes.orders import ARRIVED_NOT, Credentials, StreamOrder

__all__ = ["StreamReads"]

_ATTACH_S = 2.0
_CLIENTS = 16


class StreamReads:
    """Reads into `memory`; `read` blocks, and gives what an order's answer says. The loop starts with the first."""

    def __init__(self, memory: memoryview, credentials: Credentials) -> None:
        self._memory = memory
        self._credentials = credentials
        self._clients: OrderedDict[tuple[str, bytes], CacheClient] = OrderedDict()
        self._loop: asyncio.AbstractEventLoop | None = None

    def read(self, order: StreamOrder) -> list[bytes]:
        if self._loop is None:
            self._loop = uvloop.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="streams", daemon=True).start()
        try:
            return asyncio.run_coroutine_threadsafe(self._read(order), self._loop).result()
        except KatydidError as error:
            print(f"stream from {order.address} broke: {error}", file=sys.stderr, flush=True)
            return [ARRIVED_NOT] * len(order.places)

    async def _read(self, order: StreamOrder) -> list[bytes]:
        client = await self._client(order)
        size = order.layout.block_bytes
        views = [self._memory[offset : offset + size] for offset, _ in order.places]
        hashes = b"".join(block_hash for _, block_hash in order.places)
        with asking(Asker(order.tenant, order.session)):
            got = await client.get(0, hashes, into=views, timeout_s=order.timeout_s)
        return [xxh3_128_digest(view) if found else ARRIVED_NOT for view, found in zip(views, got.found, strict=True)]

    async def _client(self, order: StreamOrder) -> CacheClient:
        key = order.address, order.identity
        client = self._clients.pop(key, None)
        if client is not None and not client.attached:
            await client.close()
            client = None
        if client is None:
            tls, token = self._credentials.tls, self._credentials.token
            client = CacheClient(order.address, name="pull", tls=tls, token=token, lanes=0)
            try:
                await client.attach(order.identity, order.layout, timeout_s=min(_ATTACH_S, order.timeout_s))
            except KatydidError:
                await client.close()
                raise
        self._clients[key] = client
        if len(self._clients) > _CLIENTS:
            await self._clients.popitem(last=False)[1].close()
        return client
