"""How long a chunk is under way through a gateway while hundreds of streams get one token at a time.

Mock engines say in every token when they made it (tests/gateway/clock_words.py), for all streams in the same step, as
engines do. The time ends when this process has the chunk in its hands, so its own share of the cores counts too. It
looks for chunks every half millisecond, which counts as well: as network cards do, and not woken by each of them on a
core that the gateway may want.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from bench.http_load import percentile
from tests.gateway.clock_words import ClockWords

__all__ = ["chunk_delays"]

# Requests that begin are dear: what is measured is the time between the last beginning and the first end.
_SETTLED_S = 0.5
_LOOK_S = 0.0005


class _Stream(asyncio.Protocol):
    """Sends one request, and keeps what came and when, to be read afterwards."""

    def __init__(self, request: bytes, ended: asyncio.Future[None]) -> None:
        self._request = request
        self._ended = ended
        self._transport: Any = None
        self.parts: list[tuple[float, bytes]] = []

    def connection_made(self, transport: Any) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.monotonic(), data))
        if data.endswith(b"\r\n0\r\n\r\n"):
            self._transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        self._ended.set_result(None)


async def chunk_delays(port: int, bodies: list[bytes], clock: ClockWords) -> dict[str, float]:
    """Milliseconds from engine to client at p50 and p99, the share of tokens in a chunk of their own, tokens/s.

    Raises RuntimeError for a stream that did not end as it should.
    """
    loop = asyncio.get_running_loop()
    streams = [_Stream(_request(body), loop.create_future()) for body in bodies]
    for stream in streams:
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)  # type: ignore[misc]
    ended = asyncio.gather(*(stream._ended for stream in streams))
    while not ended.done():
        time.sleep(_LOOK_S)  # noqa: ASYNC251 - see above
        await asyncio.sleep(0)
    await ended
    read = [_words(stream.parts) for stream in streams]
    begin = max(words[0][0] for words in read) + _SETTLED_S
    end = min(words[-1][0] for words in read)
    chunks = [(at, words) for stream in read for at, words in stream if begin <= at <= end]
    tokens = sum(len(words) for _, words in chunks)
    # Of tokens that came together the first one waited longest.
    delays = [clock.age_s(words[0], at) * 1e3 for at, words in chunks]
    return {
        "p50": percentile(delays, 0.5),
        "p99": percentile(delays, 0.99),
        "largest": max(delays),
        "alone": sum(len(words) == 1 for _, words in chunks) / tokens,
        "tokens_per_s": tokens / (end - begin),
    }


def _request(body: bytes) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def _words(parts: list[tuple[float, bytes]]) -> list[tuple[float, list[str]]]:
    """The words of each event, and when its last byte came."""
    found: list[tuple[float, list[str]]] = []
    rest = b""
    for at, data in parts:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:]).get("choices", [])
                if content := "".join(choice["delta"].get("content") or "" for choice in choices):
                    found.append((at, content.split()))
            elif line.startswith(b"data: [DONE]"):
                return found
    raise RuntimeError(f"a stream did not end: {b''.join(data for _, data in parts)[-200:]!r}")
