"""Pulls blocks from other instances into the arena, in worker processes: over bulk lanes, or streams without them.

The instances know nothing of each other until a client that may write asks for a pull and names the source, which must
be one of those the service is told it may pull from. A pull is a client of the source like any other, and a writer here
like any other: slots are taken, filled, checked and made visible.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from katydid_cache.asking import Asker, asking
from katydid_cache.client import CacheClient
from katydid_cache.instances import Instances
from katydid_cache.lane_reads import dialled_host
from katydid_cache.layout import Span
from katydid_runtime.errors import KatydidError, PermissionDeniedError, UnavailableError
from katydid_runtime.tls import Tls

from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.cache import Cache
from katydid_kvcache.lanes.orders import Credentials, LaneOrder, StreamOrder
from katydid_kvcache.lanes.workers import LaneWorkers
from katydid_kvcache.store import Write

__all__ = ["Pulled", "Puller"]

# A lane's share of a pull goes in about four batches of blocks.
_BATCHES = 4
_BATCH_BYTES = (4 * 1024 * 1024, 32 * 1024 * 1024)
_BATCH_BLOCKS = 4096
_STALL_S = 2.0
_ATTACH_S = 2.0
_CLIENTS = 64


@dataclass(slots=True)
class Pulled:
    """Blocks that came, that were here already, and that could not be had."""

    pulled: int = 0
    present: int = 0
    missed: int = 0


class Puller:
    """Pulls into `cache` from `sources`, over `lanes` lanes at a time for all pulls together."""

    def __init__(self, cache: Cache, sources: Instances, lanes: int, *, tls: Tls | None, token: str | None) -> None:
        self._cache = cache
        self._sources = sources
        self._workers = LaneWorkers(cache.arena, lanes, Credentials(tls, token))
        # Two a lane: one is on its way while the next has its slots taken and is prepared by the source.
        self._turns = asyncio.Semaphore(2 * lanes)
        self._attaching: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tls = tls
        self._token = token
        self._clients: OrderedDict[tuple[str, bytes], CacheClient] = OrderedDict()
        # What batches under way are bringing, and when each is over: who asks for the same waits for it.
        self._coming: dict[Block, asyncio.Future[None]] = {}

    async def pull(
        self,
        namespace: Namespace,
        source: str,
        hashes: Sequence[bytes],
        parents: Sequence[bytes],
        deadline_s: float,
        asker: Asker = Asker(),
    ) -> Pulled:
        """Fetch blocks in order until done or `deadline_s` has passed; what has come by then stays.

        Raises PermissionDeniedError for a source that is not to be pulled from, UnavailableError when it does not
        answer.
        """
        if source not in self._sources.addresses:
            raise PermissionDeniedError(
                f"this service does not pull from {source}", field="source", value=source, allowed="see pull_from"
            )
        deadline = time.monotonic() + deadline_s
        async with self._attaching[source]:
            client = await self._client(namespace, source)
        pulled = Pulled()
        size = namespace.layout.block_bytes
        share = size * len(hashes) // (_BATCHES * self._workers.count)
        step = max(1, min(min(max(share, _BATCH_BYTES[0]), _BATCH_BYTES[1]) // size, _BATCH_BLOCKS))

        async def batch(start: int) -> None:
            async with self._turns:
                some = slice(start, start + step)
                await self._batch(client, namespace, source, asker, hashes[some], parents[some], deadline, pulled)

        with asking(asker):
            tasks = [asyncio.create_task(batch(start)) for start in range(0, len(hashes), step)]
        try:
            left_s = max(0.0, deadline - time.monotonic())
            done, _ = await asyncio.wait(tasks, timeout=left_s) if tasks else (set(), None)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        pulled.missed = len(hashes) - pulled.pulled - pulled.present
        self._cache.traffic.pulled_blocks += pulled.pulled
        self._cache.traffic.pulled_bytes += pulled.pulled * size
        return pulled

    async def close(self) -> None:
        self._workers.stop()
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    async def _client(self, namespace: Namespace, source: str) -> CacheClient:
        """A client attached to the source; raises UnavailableError."""
        key = (source, namespace.identity)
        client = self._clients.get(key)
        if client is None:
            client = self._clients[key] = CacheClient(source, name="pull", tls=self._tls, token=self._token)
            try:
                await client.attach(namespace.identity, namespace.layout, timeout_s=_ATTACH_S)
            except KatydidError:
                del self._clients[key]
                await client.close()
                raise
            if len(self._clients) > _CLIENTS:
                await self._clients.popitem(last=False)[1].close()
        elif not client.attached:
            raise UnavailableError(f"the cache service at {source} does not answer")
        self._clients.move_to_end(key)
        return client

    async def _batch(
        self,
        client: CacheClient,
        namespace: Namespace,
        source: str,
        asker: Asker,
        hashes: Sequence[bytes],
        parents: Sequence[bytes],
        deadline: float,
        pulled: Pulled,
    ) -> None:
        """Take slots for blocks, fill them and make them visible; those that another pull is bringing are waited for,
        and brought here if it gives them up."""
        writes: list[Write] = []
        asked: list[bytes] = []
        others: list[tuple[bytes, bytes, asyncio.Future[None]]] = []
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        names, before = self._cache.names(asker, hashes), self._cache.names(asker, parents)
        for place, (block_hash, name, parent) in enumerate(zip(hashes, names, before, strict=True)):
            begun = self._cache.begin_write(namespace, name, parent, Span(), asker.tenant)
            if isinstance(begun, Write):
                writes.append(begun)
                asked.append(block_hash)
                self._coming[begun.block] = over
            elif begun.present is not None:
                pulled.present += 1
            elif (block := namespace.blocks.get(name)) in self._coming:
                others.append((block_hash, parents[place], self._coming[block]))
        open_writes = dict(enumerate(writes))
        try:
            if writes:
                timeout_s = max(0.01, deadline - time.monotonic())
                order: LaneOrder | StreamOrder
                sent: Sequence[int] = range(len(asked))
                if client.lane_port:
                    order, sent = await self._lane_order(client, source, asked, writes, timeout_s)
                else:
                    order = self._stream_order(namespace, source, asker, asked, writes, timeout_s)
                arrived = await self._workers.run(order) if sent else []
                for place, checksum in zip(sent, arrived, strict=True):
                    if checksum is not None:
                        self._cache.writer.finish_checked(open_writes.pop(place), checksum)
                        pulled.pulled += 1
        finally:
            for write in open_writes.values():
                self._cache.writer.abort(write)
            for write in writes:
                del self._coming[write.block]
            over.set_result(None)
        if others and (left_s := deadline - time.monotonic()) > 0:
            await asyncio.wait({other for _, _, other in others}, timeout=left_s)
            again = [(block_hash, parent) for block_hash, parent, other in others if other.done()]
            hashes, parents = [block_hash for block_hash, _ in again], [parent for _, parent in again]
            await self._batch(client, namespace, source, asker, hashes, parents, deadline, pulled)

    async def _lane_order(
        self, client: CacheClient, source: str, asked: Sequence[bytes], writes: Sequence[Write], timeout_s: float
    ) -> tuple[LaneOrder, Sequence[int]]:
        """What is to be received over a lane, and the places in `writes` of the blocks that the source sends."""
        offer = await client.pulls.open_lane(b"".join(asked), timeout_s=timeout_s)
        sent = [place for place in range(len(writes)) if place not in offer.misses]
        host = dialled_host(source)
        assert host is not None
        size = writes[0].block.namespace.layout.block_bytes
        places = [
            (self._offset(writes[place]), checksum) for place, checksum in zip(sent, offer.checksums, strict=True)
        ]
        return LaneOrder(host, client.lane_port, offer.token, _STALL_S, size, places), sent

    def _stream_order(
        self,
        namespace: Namespace,
        source: str,
        asker: Asker,
        asked: Sequence[bytes],
        writes: Sequence[Write],
        timeout_s: float,
    ) -> StreamOrder:
        places = [(self._offset(write), block_hash) for write, block_hash in zip(writes, asked, strict=True)]
        return StreamOrder(source, namespace.identity, namespace.layout, asker.tenant, asker.session, timeout_s, places)

    def _offset(self, write: Write) -> int:
        slot = write.block.memory
        assert slot is not None
        return self._cache.memory.slots.position(slot)
