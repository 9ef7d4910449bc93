"""A lean HTTP/1.1 client for benchmarks of the gateway: one connection a stream, nothing parsed but what is counted."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_OF_THE_ENGINE = ("queue", "lookup", "fetch", "prefill", "handover")

__all__ = ["Exchanged", "Wire", "percentile"]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One request: seconds to its first output and to its end, events of a stream, and when each came.

    `engine_s` is what the first output took in the engine, `tokenise_s` what template and tokenizer took of it, where a
    stream's account says so.
    """

    first_s: float
    total_s: float
    events: int
    times: tuple[float, ...] = ()
    engine_s: float = 0.0
    tokenise_s: float = 0.0


class Wire:
    """One kept-alive connection."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, body: bytes, path: str = "/v1/chat/completions", *, times: bool = False) -> Exchanged:
        """POST `body`. Raises RuntimeError with the answer when the status is not 200."""
        began = time.perf_counter()
        reader, writer = await self._connected()
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        length, chunked = 0, False
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.lower().partition(b":")
            length = int(value) if name == b"content-length" else length
            chunked = chunked or (name == b"transfer-encoding" and b"chunked" in value)
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.readexactly(length)).decode())
        if not chunked:
            await reader.readexactly(length)
            now = time.perf_counter() - began
            return Exchanged(now, now, 1)
        return await self._stream(reader, began, times)

    async def _stream(self, reader: asyncio.StreamReader, began: float, times: bool) -> Exchanged:
        first, events, seen, account = 0.0, 0, [], b""
        while size := int(await reader.readline(), 16):
            chunk = await reader.readexactly(size + 2)
            found = chunk.count(b"data: {")
            now = time.perf_counter()
            # The first event of a stream is the role, which comes with the first token here.
            first = first or now - began
            events += found
            account = chunk if b'"timing"' in chunk else account
            if times:
                seen.append(now)
        await reader.readline()
        total, phases = time.perf_counter() - began, _phases_ms(account)
        engine_s = sum(phases.get(name, 0.0) for name in _OF_THE_ENGINE) / 1e3
        return Exchanged(first, total, events, tuple(seen), engine_s, phases.get("tokenise", 0.0) / 1e3)

    async def get(self, path: str) -> float:
        """Seconds that a GET takes."""
        began = time.perf_counter()
        reader, writer = await self._connected()
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {self._host}\r\n\r\n".encode())
        length = 0
        while (line := await reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.lower().partition(b":")
            length = int(value) if name == b"content-length" else length
        await reader.readexactly(length)
        return time.perf_counter() - began

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port, limit=2**20)
        return self._reader, self._writer


def _phases_ms(account: bytes) -> dict[str, float]:
    """Of the chunk with an answer's account, the phases of the time to first token."""
    for line in account.splitlines():
        if b'"timing"' in line:
            phases: dict[str, float] = json.loads(line.removeprefix(b"data: "))["timing"]["phases_ms"]
            return phases
    return {}


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def encoded(messages: list[dict[str, str]], **fields: Any) -> bytes:
    """The body of a streamed chat completion."""
    return json.dumps({"model": "mock", "messages": messages, "stream": True, **fields}).encode()
