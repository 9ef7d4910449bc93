"""One Get: blocks are brought into memory ahead, and leave in frames as the client's credit allows.

Blocks that are in memory leave in groups, layer by layer: the first layer of all of them, then the second. Blocks that
come from disk leave as they arrive.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from google.protobuf.message import DecodeError
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_cache.layout import Span, cut
from katydid_cache.records import BlockMissReason, Tier
from katydid_cache.wire import encode_get_frame
from katydid_runtime.duration import to_duration
from katydid_runtime.errors import DeadlineExceededError, InvalidRequestError

from katydid_kvcache import requests
from katydid_kvcache.blocks import Namespace
from katydid_kvcache.cache import Cache
from katydid_kvcache.checksums import payload_checksum
from katydid_kvcache.reading import Reading

__all__ = ["GetStream"]

_AHEAD = 5
_WINDOW = 64
# A stream pins at most two windows, and each at most this share of the memory.
_SHARE = 8
_LINGER_S = 1.0

Send = Callable[[bytes], Awaitable[None]]


class _Wanted(NamedTuple):
    """Block number `place` of the request; the client has its first `have` bytes."""

    place: int
    hash: bytes
    have: int


class _Opening(NamedTuple):
    """A block on its way; `near` when it was in memory."""

    wanted: _Wanted
    near: bool
    task: asyncio.Task[Reading | BlockMissReason]


class _Opened(NamedTuple):
    wanted: _Wanted
    reading: Reading


@dataclass(frozen=True, slots=True)
class _Terms:
    """What GetStart said: `size` bytes of each block in `runs`, `step` of them a layer; `window` blocks at a time."""

    namespace: Namespace
    mask: int
    runs: list[range]
    size: int
    step: int
    wanted: list[_Wanted]
    window: int


class GetStream:
    """Serves one Get RPC: reads serialised GetRequests, sends serialised GetResponses.

    A lease that has run out is no error: blocks are pinned while they are read, and those that went are misses.
    """

    def __init__(self, cache: Cache, messages: AsyncIterator[bytes], send: Send) -> None:
        self._cache = cache
        self._messages = messages
        self._send = send
        self._credit = 0
        self._credited = asyncio.Event()
        self._no_more: InvalidRequestError | None = None
        self._stall_s = cache.settings.stream_stall_timeout_s
        self._times: dict[Tier, tuple[int, float]] = {}
        self._checking = asyncio.Lock()
        self.sent = 0
        self.missed = 0
        self.bytes = 0

    async def run(self) -> None:
        """Serve until every block is answered.

        Raises InvalidRequestError for a stream that breaks the protocol, DeadlineExceededError when the client gives no
        credit for too long.
        """
        start = await self._start()
        terms = self._terms(start)
        self._credit = start.credit
        crediting = asyncio.create_task(self._collect_credit())
        ahead: deque[_Opening] = deque()
        try:
            remaining = iter(terms.wanted)
            while self._open_ahead(ahead, remaining, terms):
                started = time.monotonic()
                group: list[_Opened] = []
                try:
                    await self._fill(group, ahead, terms.window)
                    self._open_ahead(ahead, remaining, terms)
                    await self._group(group, terms)
                finally:
                    for opened in group:
                        self._cache.reader.close(opened.reading)
                self._note(group, time.monotonic() - started)
            await self._send(pb.GetResponse(summary=self._summary()).SerializeToString())
            # The client may be about to send credit: to end the call under its pen would look like a failure to it.
            await asyncio.wait([crediting], timeout=_LINGER_S)
        finally:
            crediting.cancel()
            for opening in ahead:
                await self._abandon(opening.task)

    async def _start(self) -> pb.GetStart:
        try:
            async with asyncio.timeout(self._stall_s):
                request = _parse(await anext(self._messages, b""))
        except TimeoutError:
            raise DeadlineExceededError(f"the client sent nothing for {self._stall_s:g} s") from None
        if request.WhichOneof("message") != "start":
            raise InvalidRequestError("a Get begins with GetStart", field="message", allowed="start")
        return request.start

    def _terms(self, start: pb.GetStart) -> _Terms:
        namespace = self._cache.attachments.find(start.attachment).namespace
        asker = requests.asker(start.tenant, start.session)
        hashes = self._cache.names(asker, requests.hash_list(start.hashes))
        heads, layers = requests.span(start.heads), Span(start.first_layer, start.layers)
        runs = namespace.layout.runs(heads, layers)
        size = sum(len(run) for run in runs)
        have = start.have or [0] * len(hashes)
        if len(have) != len(hashes) or max(have, default=0) > size:
            raise InvalidRequestError(
                f"{len(have)} of `have` for {len(hashes)} hashes, the largest {max(have, default=0)}",
                field="have",
                value=len(have),
                allowed=f"none, or one a hash, each at most {size}",
            )
        step = size // len(layers.resolve(namespace.layout.layers, "layers"))
        wanted = [_Wanted(*of) for of in zip(range(len(hashes)), hashes, have, strict=True)]
        room = self._cache.store.memory.slots.capacity_bytes // (_SHARE * namespace.slot_bytes)
        window = min(_WINDOW, max(_AHEAD, room))
        return _Terms(namespace, namespace.mask(heads), runs, size, step, wanted, window)

    def _open_ahead(self, ahead: deque[_Opening], remaining: Iterator[_Wanted], terms: _Terms) -> bool:
        """Keep a window of blocks on their way, so that disk reads overlap with sending; False when none are left."""
        store = self._cache.store
        for wanted in islice(remaining, terms.window - len(ahead)):
            block = store.find(terms.namespace, wanted.hash, terms.mask)
            near = block is not None and block.memory is not None
            ahead.append(_Opening(wanted, near, asyncio.create_task(self._open(wanted, terms, near))))
        return bool(ahead)

    async def _open(self, wanted: _Wanted, terms: _Terms, near: bool) -> Reading | BlockMissReason:
        reader = self._cache.reader
        if not near:
            return await reader.open(terms.namespace, wanted.hash, terms.mask)
        async with self._checking:
            # Blocks in memory are checked one a turn of the loop: others are not to wait for a whole window.
            await asyncio.sleep(0)
            return await reader.open(terms.namespace, wanted.hash, terms.mask)

    async def _fill(self, group: list[_Opened], ahead: deque[_Opening], limit: int) -> None:
        """Put the next blocks to be sent together into `group`, none when only misses are left; misses are answered."""
        while ahead and len(group) < limit:
            opening = ahead[0]
            if group and (opening.wanted.have != group[0].wanted.have or not (opening.near or opening.task.done())):
                break
            opened = await opening.task
            if isinstance(opened, Reading):
                group.append(_Opened(opening.wanted, opened))
            elif group:
                break
            else:
                await self._miss(opening.wanted.place, opened)
            ahead.popleft()

    async def _collect_credit(self) -> None:
        """Add up what the client allows; leaves in `_no_more` why nothing will come after."""
        ending = InvalidRequestError(
            "the client closed its side without credit for the rest", field="credit", allowed="credit for all blocks"
        )
        try:
            async for message in self._messages:
                self._credit += _parse(message).credit.bytes
                self._credited.set()
        except InvalidRequestError as error:
            ending = error
        self._no_more = ending
        self._credited.set()

    async def _group(self, group: list[_Opened], terms: _Terms) -> None:
        for index, opened in ((opened.wanted.place, opened.reading) for opened in group):
            whole = terms.size == len(opened.view) and opened.block.complete
            header = pb.BlockHeader(
                index=index,
                bytes=terms.size,
                checksum=opened.block.checksum if whole else payload_checksum(opened.view, terms.runs),
                tier=pb.Tier.ValueType(opened.tier),
            )
            await self._send(pb.GetResponse(block=header).SerializeToString())
        for stretch in _stretches(group[0].wanted.have if group else terms.size, terms, len(group)):
            together = max(1, requests.FRAME_BYTES // len(stretch))
            for first in range(0, len(group), together):
                await self._stretch(group[first : first + together], stretch, terms)
        self.sent += len(group)
        self.bytes += sum(terms.size - opened.wanted.have for opened in group)

    async def _stretch(self, group: list[_Opened], stretch: range, terms: _Terms) -> None:
        """Send the same bytes of a few blocks, which together fit a frame unless it is one block alone."""
        for offset in range(stretch.start, stretch.stop, requests.FRAME_BYTES):
            length = min(requests.FRAME_BYTES, stretch.stop - offset)
            await self._spend(length * len(group))
            parts = cut(terms.runs, offset, length)
            pieces = [opened.reading.view[part.start : part.stop] for opened in group for part in parts]
            await self._send(encode_get_frame(group[0].wanted.place, offset, pieces, len(group)))

    async def _miss(self, index: int, reason: BlockMissReason) -> None:
        self.missed += 1
        miss = pb.BlockMiss(index=index, reason=pb.BlockMissReason.ValueType(reason))
        await self._send(pb.GetResponse(miss=miss).SerializeToString())

    async def _spend(self, size: int) -> None:
        """Wait for credit of `size` bytes and use it."""
        while self._credit < size:
            if self._no_more is not None:
                raise self._no_more
            self._credited.clear()
            try:
                async with asyncio.timeout(self._stall_s):
                    await self._credited.wait()
            except TimeoutError:
                raise DeadlineExceededError(f"the client gave no credit for {self._stall_s:g} s") from None
        self._credit -= size

    async def _abandon(self, task: asyncio.Task[Reading | BlockMissReason]) -> None:
        """Close what was opened ahead and is not needed."""
        task.cancel()
        try:
            reading = await task
        except asyncio.CancelledError:
            return
        if isinstance(reading, Reading):
            self._cache.reader.close(reading)

    def _note(self, group: list[_Opened], duration_s: float) -> None:
        for opened in group:
            blocks, total_s = self._times.get(opened.reading.tier, (0, 0.0))
            self._times[opened.reading.tier] = blocks + 1, total_s + duration_s / len(group)

    def _summary(self) -> pb.GetSummary:
        times = [
            pb.TierTime(tier=pb.Tier.ValueType(tier), blocks=blocks, duration=to_duration(total_s))
            for tier, (blocks, total_s) in sorted(self._times.items())
        ]
        return pb.GetSummary(sent=self.sent, missed=self.missed, times=times)


def _stretches(have: int, terms: _Terms, blocks: int) -> Iterator[range]:
    """The payload from byte `have` on in whole layers, at least one and as many as fit a frame for all blocks."""
    layers = max(1, requests.FRAME_BYTES // (terms.step * max(1, blocks)))
    while have < terms.size:
        end = min(terms.size, (have // terms.step + layers) * terms.step)
        yield range(have, end)
        have = end


def _parse(message: bytes) -> pb.GetRequest:
    try:
        return pb.GetRequest.FromString(message)
    except DecodeError:
        raise InvalidRequestError(
            f"{len(message)} bytes are no GetRequest", field="message", allowed="a serialised GetRequest"
        ) from None
