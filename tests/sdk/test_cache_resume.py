"""Reads over streams: the first layer of all blocks first, and a broken stream goes on at the byte where it broke."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_cache import BlockLayout, CacheClient, PutBlock, PutOutcome, PutStatus, Span
from katydid_cache.get_call import GetCall
from katydid_cache.records import BlockMissReason
from katydid_cache.wire import Frame, decode_get_response
from katydid_kvcache.get_stream import GetStream

from tests.kvcache.inside import key, opened, payload, put
from tests.kvcache.running import LAYOUT, MIB, ServiceProcess, chain, run

LARGE = BlockLayout(layers=4, kv_heads=8, head_dim=256, dtype="float32")
"""1 MiB a layer, 4 MiB a block."""


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
    cuts=st.lists(st.integers(1, 4), max_size=4),
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
            left = iter([*cuts, 10_000])

            def stream() -> Wire:
                wires.append(Wire(cache, attachment.id, next(left)))
                return wires[-1]

            async def again() -> int:
                return attachment.id

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("katydid_kvcache.requests.FRAME_BYTES", frame)
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


@asynccontextmanager
async def cutting_proxy(address: str, limits: list[int]) -> AsyncIterator[tuple[str, list[int]]]:
    """A way to `address` whose connections end after so many bytes down, one limit each, then none; and the bytes."""
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
        up, down = await asyncio.open_connection(host, int(port))
        carried.append(0)
        with suppress(asyncio.CancelledError):
            await asyncio.gather(carry(reader, down, None), carry(up, writer, len(carried) - 1))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", carried
    finally:
        server.close()


@pytest.mark.e2e
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
