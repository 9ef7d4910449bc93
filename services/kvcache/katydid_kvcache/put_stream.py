"""One Put: blocks arrive in frames under credit, go straight into their slots, and are answered one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_cache.asking import Asker
from katydid_cache.layout import Span, cut
from katydid_cache.records import Durability, PutOutcome, PutRefusal, PutStatus
from katydid_cache.wire import Frame, decode_put_request
from katydid_runtime.block_hash import HASH_BYTES
from katydid_runtime.errors import DeadlineExceededError, InvalidRequestError

from katydid_kvcache import requests
from katydid_kvcache.blocks import Namespace
from katydid_kvcache.cache import Cache
from katydid_kvcache.checksums import CHECKSUM_BYTES
from katydid_kvcache.policy.lifetimes import Keep
from katydid_kvcache.store import Write

__all__ = ["PutStream"]

_PENDING_LIMIT = 64
# A connection that breaks may look like a client that closes its side for a moment.
_BREAK_S = 0.05
_PRESENT = PutOutcome(PutStatus.PRESENT)

Send = Callable[[bytes], Awaitable[None]]


@dataclass(slots=True)
class _Incoming:
    """The block announced last. `write` is None once it is decided: its further frames are thrown away."""

    index: int
    checksum: bytes
    write: Write | None
    received: int = 0


@dataclass(frozen=True, slots=True)
class _Terms:
    """What PutStart said."""

    namespace: Namespace
    durability: Durability
    heads: Span
    asker: Asker
    keep: Keep
    hold_s: float | None
    runs: list[range]
    size: int


class PutStream:
    """Serves one Put RPC: reads serialised PutRequests, sends serialised PutResponses."""

    def __init__(self, cache: Cache, messages: AsyncIterator[bytes], send: Send) -> None:
        self._cache = cache
        self._messages = messages
        self._send_bytes = send
        self._sending = asyncio.Lock()
        self._window = cache.settings.stream_window_bytes
        self._credit = 0
        self._consumed = 0
        self._current: _Incoming | None = None
        self._last = b""
        self._pending: dict[asyncio.Task[None], asyncio.Task[PutOutcome]] = {}
        self.stored = 0
        self.bytes = 0

    async def run(self) -> None:
        """Serve until the client has closed its side and every block is answered.

        Raises InvalidRequestError for a stream that breaks the protocol, DeadlineExceededError when the client stalls.
        Blocks that are not finished by then are given up, but for one whose connection broke: its first part is kept
        for a moment.
        """
        try:
            terms = self._open(await self._next())
            await self._grant(self._window)
            while (message := await self._next()) is not None:
                if isinstance(message, Frame):
                    await self._take(terms, message)
                elif message.WhichOneof("message") == "block":
                    await self._announce(terms, message.block)
                else:
                    raise InvalidRequestError(
                        "PutStart was sent already", field="message", allowed="block or frame after the first message"
                    )
            if self._current is not None and self._current.write is not None:
                await asyncio.sleep(_BREAK_S)
            await self._give_up_current()
            if self._pending:
                await asyncio.gather(*self._pending)
            self._cache.aftermath.of_write(terms.namespace, self._last)
        except asyncio.CancelledError:
            if (current := self._current) is not None and current.write is not None and current.received:
                write, current.write = current.write, None
                self._cache.half_writes.keep(write, current.checksum, current.received)
            raise
        finally:
            for answering, reaching in self._pending.items():
                answering.cancel()
                reaching.cancel()
            if self._current is not None and self._current.write is not None:
                self._cache.store.abort_write(self._current.write)

    def _open(self, message: Frame | pb.PutRequest | None) -> _Terms:
        if not isinstance(message, pb.PutRequest) or message.WhichOneof("message") != "start":
            raise InvalidRequestError("a Put begins with PutStart", field="message", allowed="start")
        start = message.start
        namespace = self._cache.attachments.find(start.attachment).namespace
        heads = requests.span(start.heads)
        wanted = heads.resolve(namespace.layout.kv_heads, "heads")
        runs = namespace.layout.runs(heads)
        return _Terms(
            namespace,
            requests.durability(start.durability),
            Span(wanted.start, len(wanted)),
            requests.asker(start.tenant, start.session.id),
            Keep(requests.lifetime(start), requests.session(start.session)),
            requests.hold(start.hold) if start.HasField("hold") else None,
            runs,
            sum(len(run) for run in runs),
        )

    async def _next(self) -> Frame | pb.PutRequest | None:
        """The next message; None when the client has closed its side."""
        stall_s = self._cache.settings.stream_stall_timeout_s
        try:
            async with asyncio.timeout(stall_s):
                return decode_put_request(await anext(self._messages))
        except StopAsyncIteration:
            return None
        except TimeoutError:
            raise DeadlineExceededError(f"the client sent nothing for {stall_s:g} s") from None

    async def _announce(self, terms: _Terms, block: pb.PutBlock) -> None:
        await self._give_up_current()
        expected = 0 if self._current is None else self._current.index + 1
        if block.index != expected:
            raise InvalidRequestError(
                f"block {block.index} announced out of order", field="index", value=block.index, allowed=str(expected)
            )
        block_hash = requests.exact_bytes(block.hash, (HASH_BYTES,), "hash")
        parent = requests.exact_bytes(block.parent, (0, HASH_BYTES), "parent")
        checksum = requests.exact_bytes(block.checksum, (CHECKSUM_BYTES,), "checksum")
        name, parent_name = self._cache.names(terms.asker, [block_hash, parent])
        self._last = name
        if block.resume and await self._go_on(terms, block.index, name, checksum):
            return
        while True:
            begun = self._cache.begin_write(
                terms.namespace, name, parent_name, terms.heads, terms.asker.tenant, terms.keep.session
            )
            if isinstance(begun, Write) or begun.refusal is not PutRefusal.NO_ROOM or not self._pending:
                break
            # Slots of this stream's own blocks are held until they are on disk; one of them will come free.
            await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
        self._current = _Incoming(block.index, checksum, begun if isinstance(begun, Write) else None)
        if isinstance(begun, Write):
            if block.resume:
                await self._send(pb.PutResponse(resume=pb.PutResume(index=block.index, received=0)))
            return
        if begun.present is not None and terms.hold_s:
            self._cache.hold(begun.present, terms.hold_s)
        if begun.present is None:
            await self._answer(block.index, PutOutcome(PutStatus.REFUSED, begun.refusal))
        elif terms.durability is Durability.DISK:
            await self._later(block.index, self._cache.writer.reach_disk(begun.present, _PRESENT))
        else:
            await self._answer(block.index, _PRESENT)

    async def _go_on(self, terms: _Terms, index: int, name: bytes, checksum: bytes) -> bool:
        """Go on with a block of which another stream brought the first part; False when it is not there."""
        half = self._cache.half_writes.take(terms.namespace, name, terms.heads, checksum)
        if half is None:
            return False
        self._current = _Incoming(index, checksum, half.write, half.received)
        await self._send(pb.PutResponse(resume=pb.PutResume(index=index, received=half.received)))
        # A connection may break after the last frame has come and before the block is finished: no frame follows then.
        await self._finish_if_whole(terms, self._current)
        return True

    async def _take(self, terms: _Terms, frame: Frame) -> None:
        current, size = self._current, len(frame.data)
        if current is None or frame.index != current.index:
            raise InvalidRequestError(
                "a frame of a block that was not announced last",
                field="frame.index",
                value=frame.index,
                allowed="the index of the last PutBlock",
            )
        if not 0 < size <= requests.FRAME_BYTES or frame.offset != current.received or frame.offset + size > terms.size:
            raise InvalidRequestError(
                f"a frame of {size} bytes at offset {frame.offset}",
                field="frame",
                value=f"{frame.offset}+{size}",
                allowed=f"offset {current.received}, 1 to {requests.FRAME_BYTES} bytes, {terms.size} in all",
            )
        self._credit -= size
        if self._credit < 0:
            raise InvalidRequestError(
                "the client sent more than it had credit for", field="frame", value=size, allowed="bytes within credit"
            )
        current.received += size
        if current.write is not None and current.write.block.memory is not None:
            view, at = self._cache.memory.view(current.write.block), 0
            for part in cut(terms.runs, frame.offset, size):
                view[part.start : part.stop] = frame.data[at : at + len(part)]
                at += len(part)
        await self._consume(size)
        await self._finish_if_whole(terms, current)

    async def _finish_if_whole(self, terms: _Terms, current: _Incoming) -> None:
        if current.write is None or current.received < terms.size:
            return
        write, current.write = current.write, None
        outcome = self._cache.writer.finish(write, current.checksum, terms.keep)
        if terms.hold_s and outcome.status is PutStatus.STORED:
            self._cache.hold(write.block, terms.hold_s)
        if terms.durability is Durability.DISK and outcome.status is PutStatus.STORED:
            await self._later(current.index, self._cache.writer.reach_disk(write.block, outcome))
        else:
            await self._answer(current.index, outcome)

    async def _give_up_current(self) -> None:
        """The client moved on: a block without all its frames is refused."""
        current = self._current
        if current is not None and current.write is not None:
            write, current.write = current.write, None
            self._cache.store.abort_write(write)
            await self._answer(current.index, PutOutcome(PutStatus.REFUSED, PutRefusal.INCOMPLETE))

    async def _later(self, index: int, reaching: asyncio.Task[PutOutcome]) -> None:
        """Answer when the block has reached the disk or can't, and go on with the next block meanwhile."""

        async def answer() -> None:
            await self._answer(index, await reaching)

        answering = asyncio.create_task(answer())
        self._pending[answering] = reaching
        answering.add_done_callback(lambda task: self._pending.pop(task, None))
        if len(self._pending) >= _PENDING_LIMIT:
            await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)

    async def _answer(self, index: int, outcome: PutOutcome) -> None:
        self.stored += outcome.status is PutStatus.STORED
        status = pb.PutStatus.ValueType(outcome.status)
        refusal = pb.PutRefusal.ValueType(outcome.refusal or PutRefusal.UNSPECIFIED)
        result = pb.PutResult(index=index, status=status, refusal=refusal)
        await self._send(pb.PutResponse(result=result))

    async def _consume(self, size: int) -> None:
        """Give credit back, several frames' worth at a time."""
        self.bytes += size
        self._consumed += size
        if self._consumed >= self._window // 4:
            consumed, self._consumed = self._consumed, 0
            await self._grant(consumed)

    async def _grant(self, size: int) -> None:
        self._credit += size
        await self._send(pb.PutResponse(credit=pb.Credit(bytes=size)))

    async def _send(self, response: pb.PutResponse) -> None:
        async with self._sending:
            await self._send_bytes(response.SerializeToString())
