"""Heads of requests that never end or never come: refused or closed, while others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

from katydid_gateway.http import bounded_heads
from katydid_gateway.http.bounded_heads import HEAD_LIMIT

from tests.gateway.mock_engine import MockOptions
from tests.gateway.rig import Rig, rig

CHUNKED = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def run(folder: Path, scenario: Any, options: MockOptions | None = None) -> None:
    async def body() -> None:
        async with rig(folder, options=options) as built:
            await scenario(built)

    asyncio.run(body())


async def connect(built: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = built.gateway.http_address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def send_for_ever(writer: asyncio.StreamWriter, piece: bytes) -> None:
    """Returns when the other side has had enough."""
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)


def test_an_endless_head_is_refused(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        for piece in (b"b" * 4096, b"h: x\r\n" * 700):
            reader, writer = await connect(built)
            writer.write(b"GET /healthz HTTP/1.1\r\nA: " + (b"x\r\n" if b"\n" in piece else b""))
            # One piece beyond the limit is sent, so that nothing unread turns the refusal into a reset.
            for _ in range(HEAD_LIMIT // len(piece) + 1):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
            head, _, body = (await asyncio.wait_for(reader.read(4096), 10)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 431 ")
            assert json.loads(body)["error"]["allowed"] == f"at most {HEAD_LIMIT} bytes"
            await asyncio.wait_for(send_for_ever(writer, piece), 10)
            writer.close()
        assert (await built.chat()).status_code == 200

    run(chatml, scenario)


def test_endless_trailers_end_their_connection_and_small_chunks_do_not(chatml: Path) -> None:
    async def scenario(built: Rig) -> None:
        text = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}).encode().ljust(60_000)
        chunks = b"".join(b"3\r\n" + text[at : at + 3] + b"\r\n" for at in range(0, len(text), 3))
        reader, writer = await connect(built)
        writer.write(CHUNKED + chunks + b"0\r\n\r\n")
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 200 ")
        writer.close()
        reader, writer = await connect(built)
        writer.write(CHUNKED + b"2\r\n{}\r\n0\r\n")
        await asyncio.wait_for(send_for_ever(writer, b"t: x\r\n" * 700), 10)
        writer.close()

    run(chatml, scenario)


def test_a_head_that_does_not_come_ends_its_connection_and_no_stream(chatml: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(bounded_heads, "HEAD_TIMEOUT_S", 0.2)

    async def scenario(built: Rig) -> None:
        for begun in (b"", b"GET /hea", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /hea"):
            reader, writer = await connect(built)
            writer.write(begun)
            await asyncio.wait_for(reader.read(), 10)
            writer.close()
        events = await built.events(messages=[{"role": "user", "content": "x"}], max_tokens=8)
        assert events[-1] == "[DONE]"

    run(chatml, scenario, MockOptions(step_s=0.1))
