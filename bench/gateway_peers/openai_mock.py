"""An OpenAI-compatible engine that computes nothing, for gateways that speak HTTP to theirs.

    PYTHONPATH=. python bench/gateway_peers/openai_mock.py --step-ms 1 --tokens-per-step 1

Prints READY and its address. It reads a body whole and looks for `max_tokens` alone, so that what is measured is the
gateway; streams get an event a step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from typing import Any

import uvloop

from tests.gateway.clock_words import ClockWords

_MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: "
_MODELS = json.dumps({"object": "list", "data": [{"id": "mock", "object": "model", "created": 0, "owned_by": "x"}]})
_PAGES = {b"/v1/models": _MODELS, b"/get_model_info": '{"model_path": "mock"}', b"/get_server_info": "{}"}


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(content: str, finish: str | None) -> bytes:
    """One event of a chat stream."""
    choice = {"index": 0, "delta": {"content": content}, "finish_reason": finish}
    body = {"id": "chat-1", "object": "chat.completion.chunk", "created": 0, "model": "mock", "choices": [choice]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


class Connection(asyncio.Protocol):
    """One kept-alive connection, one request at a time."""

    def __init__(self, step_s: float, tokens_per_step: int, clock: ClockWords | None) -> None:
        self._step_s = step_s
        self._per_step = tokens_per_step
        self._clock = clock
        self._buffer = bytearray()
        self._transport: Any = None
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: Any) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        if self._answering is not None:
            self._answering.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n", 0, 65536)
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        found = re.search(rb"content-length: *(\d+)", head)
        size = int(found[1]) if found else 0
        if len(self._buffer) >= end + 4 + size:
            body = bytes(self._buffer[end + 4 : end + 4 + size])
            del self._buffer[: end + 4 + size]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        path = head.split(b" ", 2)[1]
        if not head.startswith(b"post"):
            page = _PAGES.get(path, "{}").encode()
            self._transport.write(_HEAD + b"application/json\r\ncontent-length: %d\r\n\r\n" % len(page) + page)
        elif path.endswith(b"/render"):
            self._transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        else:
            found = _MAX_TOKENS.search(body, max(0, len(body) - 400)) or _MAX_TOKENS.search(body)
            self._answering = asyncio.create_task(self._stream(int(found[1]) if found else 16))

    async def _stream(self, tokens: int) -> None:
        self._transport.write(_HEAD + b"text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        due = time.monotonic()
        for made in range(0, tokens, self._per_step):
            due = max(due + self._step_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            last = made + self._per_step >= tokens
            word = " word" if self._clock is None else self._clock.word(time.monotonic())
            self._transport.write(chunk(event(word * min(self._per_step, tokens - made), "length" if last else None)))
        self._transport.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def serve(port: int, step_s: float, tokens_per_step: int, clock: ClockWords | None) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(step_s, tokens_per_step, clock), "127.0.0.1", port)
    print("READY", f"127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--clock", metavar="FOLDER", help="text says when it was made, in words of this model")
    options = parser.parse_args()
    clock = ClockWords(options.clock) if options.clock else None
    uvloop.run(serve(options.port, options.step_ms / 1e3, options.tokens_per_step, clock))


if __name__ == "__main__":
    main()
