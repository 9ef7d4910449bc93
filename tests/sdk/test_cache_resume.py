"""Streams that break go on at the byte where they broke, reads and writes; reads bring the first layer of all first."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_cache import BlockLayout, CacheClient, Durability, PutBlock, PutOutcome, PutRefusal, PutStatus, Span
from katydid_cache.get_call import GetCall
from katydid_cache.put_call import PutCall, PutTerms, put_start
from katydid_cache.records import BlockMissReason
from katydid_cache.wire import Frame, decode_get_response, decode_put_request
from katydid_kvcache.changes import Write
from katydid_kvcache.get_stream import GetStream
from katydid_kvcache.put_stream import PutStream

from tests.kvcache.inside import get, key, opened, payload, put
from tests.kvcache.running import LAYOUT, MIB, ServiceProcess, chain, run

LARGE = BlockLayout(layers=4, kv_heads=8, head_dim=256, dtype="float32")
"""1 MiB a layer, 4 MiB a block."""

WINDOW = 2 * MIB
"""So much of a Put may be on its way when its connection is cut."""


class Wire:
    """A call whose other side is a GetStream in this process; breaks after `frames` frames."""

    def __init__(self, cache: Any, attachment: int, frames: int) -> None:
        self._cache = cache
        self._to_service: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._to_client: asyncio.Queue[Any] = asyncio.Queue()
        self._frames = frames
        self._attachment = attachment
        self.seen: list[Frame] = []
        self._serving = asyncio.create_task(self._serve())

    async def write(self, message: bytes) -> None:
        await self._to_service.put(message)

    async def done_writing(self) -> None:
        await self._to_service.put(None)

    async def read(self) -> Any:
        message = await self._to_client.get()
        if isinstance(message, Exception):
            raise message
        return message

    def cancel(self) -> None:
        self._serving.cancel()

    async def _messages(self) -> AsyncIterator[bytes]:
        while (message := await self._to_service.get()) is not None:
            yield message

    async def _send(self, message: bytes) -> None:
        frame = decode_get_response(message)
        if isinstance(frame, Frame):
            if self._frames == 0:
                raise ConnectionError
            self._frames -= 1
            self.seen.append(frame)
        await self._to_client.put(message)

    async def _serve(self) -> None:
        try:
            await GetStream(self._cache, self._messages(), self._send).run()
            await self._to_client.put(grpc.aio.EOF)
        except ConnectionError:
            await self._to_client.put(_broken())


def _broken() -> Exception:
    metadata = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "cut")


@settings(max_examples=40, deadline=None)
@given(
    names=st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True),
    absent=st.integers(0, 3),
    heads=st.sampled_from([Span(), Span(0, 1), Span(1, 1)]),
    layers=st.sampled_from([Span(), Span(1, 2), Span(3, 1)]),
    cuts=st.lists(st.integers(0, 4), max_size=4),
    frame=st.sampled_from([3000, 8192, 20_000, 1 << 20]),
)
def test_any_read_cut_anywhere_is_whole_in_the_end(
    names: list[int], absent: int, heads: Span, layers: Span, cuts: list[int], frame: int
) -> None:
    """Every payload byte comes once: what had arrived is not sent again."""

    async def scenario() -> None:
        async with opened() as (cache, space):
            for name in range(absent, 8):
                put(cache, space, name)
            attachment = cache.attachments.join(space, arena=False)
            size = LAYOUT.payload_bytes(heads, layers)
            into = [memoryview(bytearray(size)) for _ in names]
            getting = GetCall(b"".join(map(key, names)), into)
            wires: list[Wire] = []
            # One of no frames moves nothing; behind one that did, it is followed by another all the same.
            left = iter([*([max(1, cuts[0]), *cuts[1:]] if cuts else ()), 10_000])

            def stream() -> Wire:
                wires.append(Wire(cache, attachment.id, next(left)))
                return wires[-1]

            async def again() -> int:
                return attachment.id

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("katydid_kvcache.requests.FRAME_BYTES", frame)
                patch.setattr("katydid_cache.resuming.RESUME_S", 20.0)
                start = pb.GetStart(
                    attachment=attachment.id,
                    heads=pb.HeadRange(first=heads.first, count=heads.count),
                    first_layer=layers.first,
                    layers=layers.count,
                )
                await asyncio.wait_for(getting.run(stream, start, again), 10)
            found = tuple(name >= absent for name in names)
            assert getting.result(BlockMissReason.ABSENT).found == found
            for name, there, buffer in zip(names, found, into, strict=True):
                whole = payload(name)
                wanted = b"".join(whole[run.start : run.stop] for run in LAYOUT.runs(heads, layers))
                assert not there or buffer == wanted
            sent = sum(len(seen.data) for wire in wires for seen in wire.seen)
            assert sent == size * sum(found)
            if all(found):
                step = size // len(layers.resolve(LAYOUT.layers, "layers"))
                order = [seen.offset // step for seen in wires[0].seen]
                assert order == sorted(order), "a later layer came before an earlier one of another block"
            await asyncio.sleep(0)
            assert all(block.pins == 0 for block in space.blocks.values())

    asyncio.run(scenario())


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that wait longer for a service to be back: on a busy machine a second is not much."""
    monkeypatch.setattr("katydid_cache.resuming.RESUME_S", 20.0)


class PatientService(ServiceProcess):
    """Keeps half a write until such a client is back, which takes as long as the machine is busy."""

    _program = (
        "-c",
        "import runpy; from katydid_kvcache import half_writes; half_writes._KEEP_S = 30.0;"
        "runpy.run_module('katydid_kvcache', run_name='__main__')",
    )


@asynccontextmanager
async def cutting_proxy(address: str, limits: list[int], *, up: bool = False) -> AsyncIterator[tuple[str, list[int]]]:
    """A way to `address` whose connections end after so many bytes down (or `up`), one limit each, then none; and the
    bytes."""
    host, _, port = address.rpartition(":")
    carried: list[int] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int | None) -> None:
        with suppress(OSError, asyncio.CancelledError):
            while data := await reader.read(65536):
                if number is not None:
                    carried[number] += len(data)
                    if number < len(limits) and carried[number] > limits[number]:
                        break
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_service, to_service = await asyncio.open_connection(host, int(port))
        number = len(carried)
        carried.append(0)
        with suppress(asyncio.CancelledError):
            await asyncio.gather(
                carry(reader, to_service, number if up else None),
                carry(from_service, writer, None if up else number),
            )

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", carried
    finally:
        server.close()


@pytest.mark.e2e
@pytest.mark.usefixtures("patient")
def test_a_cut_connection_is_resumed_in_mid_object(tmp_path: Path) -> None:
    async def scenario(service: ServiceProcess) -> None:
        content = random.Random(3).randbytes(LARGE.block_bytes)
        blocks = [PutBlock(bytes([number]) * 32, b"", content) for number in range(3)]
        async with cutting_proxy(service.address, [5 << 20]) as (address, carried), CacheClient(address) as cache:
            async with CacheClient(service.address) as direct:
                await direct.attach(b"l" * 32, LARGE)
                assert await direct.put(blocks) == [PutOutcome(PutStatus.STORED)] * 3
            await cache.attach(b"l" * 32, LARGE)
            into = [memoryview(bytearray(LARGE.block_bytes)) for _ in blocks]
            result = await cache.get(0, chain(blocks), into=into)
            assert result.prefix == 3
            assert all(buffer == content for buffer in into)
            assert len(carried) == 2
            # What was on its way when the connection was cut comes again, and nothing else.
            assert sum(carried) < 3 * LARGE.block_bytes + (5 << 20)

    with ServiceProcess(memory_bytes=64 * MIB, slab_bytes=32 * MIB) as service:
        run(lambda: scenario(service))


class PutWire:
    """A call whose other side is a PutStream in this process; breaks after `frames` frames have arrived there: where
    the next message is read, or, with `answering`, where something is sent before.

    `seen` has the payload bytes that arrived, by block.
    """

    def __init__(self, cache: Any, frames: int, *, answering: bool = False) -> None:
        self._answering = answering
        self._to_service: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._to_client: asyncio.Queue[Any] = asyncio.Queue()
        self._frames = frames
        self.seen: Counter[bytes] = Counter()
        self._serving = asyncio.create_task(self._serve(cache))

    async def write(self, message: bytes) -> None:
        await self._to_service.put(message)

    async def done_writing(self) -> None:
        await self._to_service.put(None)

    async def read(self) -> Any:
        message = await self._to_client.get()
        if isinstance(message, Exception):
            raise message
        return message

    def cancel(self) -> None:
        self._serving.cancel()

    async def _messages(self) -> AsyncIterator[bytes]:
        announced = b""
        while (message := await self._to_service.get()) is not None:
            request = decode_put_request(message)
            if isinstance(request, Frame):
                if self._frames == 0:
                    raise asyncio.CancelledError  # what a handler sees of a connection that broke
                self._frames -= 1
                self.seen[announced] += len(request.data)
            elif request.WhichOneof("message") == "block":
                announced = request.block.hash
            yield message

    async def _send(self, message: bytes) -> None:
        if self._frames == 0 and self._answering:
            raise asyncio.CancelledError
        await self._to_client.put(message)

    async def _serve(self, cache: Any) -> None:
        try:
            stream = PutStream(cache, self._messages(), self._send)
            stream._window = 2 * LAYOUT.block_bytes  # credit is given back twice a block
            await stream.run()
            await self._to_client.put(grpc.aio.EOF)
        except asyncio.CancelledError:
            await self._to_client.put(_broken())


@settings(max_examples=40, deadline=None)
@given(
    names=st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True),
    present=st.integers(0, 3),
    heads=st.sampled_from([Span(), Span(0, 1), Span(1, 1)]),
    cuts=st.lists(st.tuples(st.integers(1, 6), st.booleans()), max_size=4),
    frame=st.sampled_from([3000, 8192, 20_000, 1 << 20]),
)
def test_any_write_cut_anywhere_is_whole_in_the_end(
    names: list[int], present: int, heads: Span, cuts: list[tuple[int, bool]], frame: int
) -> None:
    """No payload byte that has arrived is taken twice."""

    async def scenario() -> None:
        async with opened() as (cache, space):
            for name in range(present):
                put(cache, space, name)
            attachment = cache.attachments.join(space, arena=False)
            runs = LAYOUT.runs(heads)
            payloads = [b"".join(payload(name)[run.start : run.stop] for run in runs) for name in names]
            blocks = [PutBlock(key(name), b"", content) for name, content in zip(names, payloads, strict=True)]
            wires: list[PutWire] = []
            left = iter([*cuts, (10_000, False)])

            def stream() -> PutWire:
                frames, answering = next(left)
                wires.append(PutWire(cache, frames, answering=answering))
                return wires[-1]

            async def again() -> int:
                return attachment.id

            putting = PutCall(blocks, frame)
            terms = PutTerms(Durability.MEMORY, heads, b"", None, False, None, math.inf)
            start = put_start(attachment.id, terms)
            await asyncio.wait_for(putting.run(stream, start, again), 10)
            for name, outcome in zip(names, putting.outcomes(PutRefusal.STORE_UNAVAILABLE), strict=True):
                # A block whose answer was lost with its connection is there when it is announced again.
                assert outcome.status is PutStatus.PRESENT or name >= present
                assert outcome.status in (PutStatus.STORED, PutStatus.PRESENT)
                mask = space.mask(heads)
                got = await get(cache, space, name, mask)
                assert isinstance(got, bytes)
                assert all(got[run.start : run.stop] == payload(name)[run.start : run.stop] for run in runs)
            for name, content in zip(names, payloads, strict=True):
                assert name < present or sum(wire.seen[key(name)] for wire in wires) == len(content)
            assert not cache.half_writes
            await asyncio.sleep(0)
            assert all(block.pins == 0 for block in space.blocks.values())

    asyncio.run(scenario())


@pytest.mark.e2e
@pytest.mark.usefixtures("patient")
def test_a_write_over_a_cut_connection_goes_on_in_mid_object(tmp_path: Path) -> None:
    async def scenario(service: ServiceProcess) -> None:
        content = random.Random(3).randbytes(LARGE.block_bytes)
        blocks = [PutBlock(bytes([number]) * 32, b"", content) for number in range(3)]
        cut = (7 << 20) + (1 << 19)  # half a frame before the end of the second block
        async with cutting_proxy(service.address, [cut], up=True) as (address, carried), CacheClient(address) as cache:
            await cache.attach(b"l" * 32, LARGE)
            outcomes = await cache.put(blocks)
            assert {outcome.status for outcome in outcomes} <= {PutStatus.STORED, PutStatus.PRESENT}, outcomes
            into = [memoryview(bytearray(LARGE.block_bytes)) for _ in blocks]
            assert (await cache.get(0, chain(blocks), into=into)).prefix == 3
            assert all(buffer == content for buffer in into)
            assert len(carried) == 2
            # What the service had of the block in mid-flight was not sent again: what was on its way to it was.
            assert sum(carried) < 3 * LARGE.block_bytes + WINDOW + (1 << 19)

    with PatientService(memory_bytes=64 * MIB, slab_bytes=32 * MIB, stream_window_bytes=WINDOW) as service:
        run(lambda: scenario(service))


def test_half_a_write_is_kept_for_a_moment_and_yields_to_whoever_begins_anew() -> None:
    async def scenario() -> None:
        async with opened(memory_bytes=4 * MIB) as (cache, space):

            def begin(name: int) -> Write:
                begun = cache.begin_write(space, key(name), b"", Span(0, 2))
                assert isinstance(begun, Write)
                return begun

            cache.half_writes.keep(begin(1), b"c" * 16, 100)
            assert cache.half_writes.take(space, key(1), Span(0, 2), b"d" * 16) is None, "other bytes"
            assert cache.half_writes.take(space, key(1), Span(0, 1), b"c" * 16) is None, "other heads"
            begin(1)
            assert not cache.half_writes, "whoever begins the block anew has its slot"
            for name in range(2, 70):
                cache.half_writes.keep(begin(name), b"c" * 16, 100)
            assert len(cache.half_writes) == 64
            assert key(2) not in space.blocks, "the oldest is given up when there are too many"
            half = cache.half_writes.take(space, key(69), Span(0, 2), b"c" * 16)
            assert half is not None
            assert half.received == 100
            cache.store.abort_write(half.write)
            async with asyncio.timeout(10):
                while cache.half_writes:
                    await asyncio.sleep(0.05)
            assert [*space.blocks] == [key(1)]
            for name in range(200, 264):
                cache.half_writes.keep(begin(name), b"c" * 16, 100)
            for name in range(300, 364):
                begin(name)
            assert not cache.half_writes, "nor do they keep others out"

    asyncio.run(scenario())
