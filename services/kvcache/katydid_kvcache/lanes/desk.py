"""The sending end of bulk lanes: tokens are issued against pinned blocks, and a thread sends them out of the arena.

The kernel copies straight from the mapped memory; `sendfile` of the arena's pages saves that copy and is slower all the
same, because it wakes the receiver for every 64 KiB (2.4 against 3.3 GB/s a lane). The receiver checks every block; one
that it names in its receipt is looked at here and quarantined if it is wrong here too, so blocks stay pinned until
then. A thread serves a connection only while blocks go out; between tokens a connection costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from katydid_cache.lane import RECEIPT, TOKEN_BYTES, end_silence_after
from katydid_cache.records import BlockMissReason, Tier
from katydid_runtime.errors import AddressInUseError
from katydid_runtime.exposition import split_address

from katydid_kvcache.blocks import Block, Namespace
from katydid_kvcache.cache import Cache

__all__ = ["LaneDesk", "Offer"]

_TOKEN_LIFE_S = 30.0
_IDLE_S = 120.0
_RETRY_S = 0.5
_CONNECTION_LIMIT = 256
_IOV_MAX = 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks ready to go: `token` to show (empty: none), `checksums` packed, `misses` by place in the request, and
    `times` (blocks, seconds to have them in memory) by the tier they came from."""

    token: bytes
    checksums: bytes
    misses: dict[int, BlockMissReason]
    times: dict[Tier, tuple[int, float]]


@dataclass(slots=True, eq=False)
class _Parcel:
    """What a token stands for."""

    blocks: list[Block]
    views: list[memoryview]
    expiry: asyncio.TimerHandle | None = None


class LaneDesk:
    """Lanes out of `cache`: `threads` connections are served at a time, none may be silent for `stall_s`."""

    def __init__(self, cache: Cache, *, threads: int, stall_s: float) -> None:
        self._cache = cache
        self._stall_s = stall_s
        self._parcels: dict[bytes, _Parcel] = {}
        self._connections: set[socket.socket] = set()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="lane")
        self._listening: asyncio.Task[None] | None = None
        self.port = 0

    async def open(self, namespace: Namespace, hashes: Sequence[bytes]) -> Offer:
        """Pin the blocks and have them in memory, for whoever shows the token in time."""
        store, found, misses = self._cache.store, dict[int, Block](), dict[int, BlockMissReason]()
        for place, block_hash in enumerate(hashes):
            block = store.find(namespace, block_hash, namespace.all_heads)
            if block is None:
                misses[place] = BlockMissReason.ABSENT
            else:
                found[place] = block
        store.pin(found.values())
        parcel = _Parcel([], [])
        times: dict[Tier, tuple[int, float]] = {}
        try:
            below = [block for block in found.values() if block.memory is None]
            raised = dict(zip(below, await asyncio.gather(*map(self._raise, below)), strict=True))
            for place, block in found.items():
                reason, tier, elapsed_s = raised.get(block, (None, Tier.MEMORY, 0.0))
                if reason is not None or block.memory is None:
                    misses[place] = reason or BlockMissReason.ABSENT
                    continue
                blocks, total_s = times.get(tier, (0, 0.0))
                times[tier] = blocks + 1, max(total_s, elapsed_s)
                parcel.blocks.append(block)
                parcel.views.append(self._cache.memory.view(block))
        finally:
            kept = set(map(id, parcel.blocks))
            store.unpin(block for block in found.values() if id(block) not in kept)
        if not parcel.blocks:
            return Offer(b"", b"", misses, times)
        token = secrets.token_bytes(TOKEN_BYTES)
        parcel.expiry = asyncio.get_running_loop().call_later(_TOKEN_LIFE_S, self._expire, token)
        self._parcels[token] = parcel
        return Offer(token, b"".join(block.checksum for block in parcel.blocks), misses, times)

    def start(self, listen: str) -> None:
        """Listen at "host:port". Raises AddressInUseError."""
        host, port = split_address(listen)
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(64)
        except OSError as error:
            listener.close()
            reason = error.strerror or str(error)
            raise AddressInUseError(
                f"cannot listen on {listen}: {reason}", field="lane_listen", value=listen
            ) from error
        listener.setblocking(False)
        self.port = int(listener.getsockname()[1])
        self._listening = asyncio.create_task(self._listen(listener))

    async def stop(self) -> None:
        """Break all lanes and unpin what was promised."""
        if self._listening is not None:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        await asyncio.to_thread(self._threads.shutdown)
        for token in list(self._parcels):
            self._expire(token)

    async def _raise(self, block: Block) -> tuple[BlockMissReason | None, Tier, float]:
        """Bring a block into memory; why not, where it was, and the time it took."""
        started, tier = time.monotonic(), Tier.SHARED if block.only_shared else Tier.DISK
        reason = await self._cache.reader.promote(block)
        return reason, tier, time.monotonic() - started

    def _expire(self, token: bytes) -> None:
        if (parcel := self._take(token)) is not None:
            self._cache.store.unpin(parcel.blocks)

    def _take(self, token: bytes) -> _Parcel | None:
        parcel = self._parcels.pop(token, None)
        if parcel is not None and parcel.expiry is not None:
            parcel.expiry.cancel()
        return parcel

    async def _listen(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as lanes:
            with listener:
                while True:
                    try:
                        connection, _ = await loop.sock_accept(listener)
                    except OSError as error:
                        # Mostly a process out of descriptors: whoever waits is served once there are some again.
                        logger.error("cannot take a bulk lane: %s", error)
                        await asyncio.sleep(_RETRY_S)
                        continue
                    if len(self._connections) >= _CONNECTION_LIMIT:
                        connection.close()
                        continue
                    lanes.create_task(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        """One lane: tokens, one after another, until the other side closes or shows a wrong one."""
        loop = asyncio.get_running_loop()
        self._connections.add(connection)
        with contextlib.closing(connection), contextlib.suppress(OSError, TimeoutError):
            try:
                while (parcel := self._take(await _token(loop, connection))) is not None:
                    try:
                        end_silence_after(connection, self._stall_s)
                        # Shielded: the blocks may be unpinned only when the thread no longer sends them.
                        sending = loop.run_in_executor(self._threads, _send, connection, parcel)
                        for suspect in await _finish(sending):
                            self._cache.reader.withdraw_if_wrong(suspect)
                    except OSError:
                        self._cache.traffic.broken_lanes += 1
                        raise
                    finally:
                        self._cache.store.unpin(parcel.blocks)
                    self._cache.traffic.sent_bytes += sum(map(len, parcel.views))
                    connection.setblocking(False)
            finally:
                self._connections.discard(connection)


async def _token(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> bytes:
    token = b""
    async with asyncio.timeout(_IDLE_S):
        while len(token) < TOKEN_BYTES:
            received = await loop.sock_recv(connection, TOKEN_BYTES - len(token))
            if not received:
                return b""
            token += received
    return token


async def _finish(sending: asyncio.Future[list[Block]]) -> list[Block]:
    """The result of a thread's work, waited for even when the waiting is cancelled."""
    try:
        return await asyncio.shield(sending)
    except asyncio.CancelledError:
        await asyncio.gather(sending, return_exceptions=True)
        raise


def _send(connection: socket.socket, parcel: _Parcel) -> list[Block]:
    """Send a parcel and read its receipt: the blocks that arrived wrong. Raises OSError."""
    left = deque(parcel.views)
    while left:
        # All in one call: a thread that comes back for every block waits for the loop, which holds the interpreter.
        sent = connection.sendmsg(list(islice(left, _IOV_MAX)))
        while left and sent >= len(left[0]):
            sent -= len(left.popleft())
        if sent:
            left[0] = left[0][sent:]
    (count,) = RECEIPT.unpack(_exactly(connection, RECEIPT.size))
    if count > len(parcel.blocks):
        raise ConnectionError(f"a receipt names {count} of {len(parcel.blocks)} blocks")
    places = [place for (place,) in RECEIPT.iter_unpack(_exactly(connection, RECEIPT.size * count))]
    if any(place >= len(parcel.blocks) for place in places):
        raise ConnectionError("a receipt names a block that was not sent")
    return [parcel.blocks[place] for place in places]


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        more = connection.recv(size - len(received))
        if not more:
            raise ConnectionError("the lane was closed before its receipt")
        received += more
    return received
