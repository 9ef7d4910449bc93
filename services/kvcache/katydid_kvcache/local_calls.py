"""Serves short calls over the arena's Unix socket: the same handlers as over gRPC, without what gRPC costs.

`katydid_cache.local_calls` is the wire format. A connection belongs to a client that has shown its one-time token; what
the client holds, it holds through its Attach stream, which a lost connection does not end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

from google.protobuf.message import DecodeError, Message
from katydid_cache.local_calls import REQUEST, RESPONSE, unpack_head
from katydid_runtime.errors import DeadlineExceededError, InvalidRequestError, KatydidError, UnsupportedError
from katydid_runtime.rpc_errors import internal_error, to_status

__all__ = ["CallContext", "Handler", "LocalConnection"]

_REQUEST_BYTES = 1024 * 1024


class CallContext:
    """What handlers ask a gRPC context for."""

    def __init__(self, metadata: Sequence[tuple[str, str]]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata


class Handler(NamedTuple):
    """One method: its full name, its request, and what answers it."""

    full_name: str
    request: type[Message]
    answer: Callable[[Any, Any], Awaitable[Message]]


class LocalConnection(asyncio.Protocol):
    """One client. `admit` is called with method and metadata of every call and raises for one that is not to be."""

    def __init__(
        self, handlers: Mapping[str, Handler], admit: Callable[[str, Sequence[tuple[str, str]]], None]
    ) -> None:
        self._handlers = handlers
        self._admit = admit
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._running: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are of no such class

    def connection_lost(self, _error: Exception | None) -> None:
        for task in self._running.values():
            task.cancel()

    def pause_writing(self) -> None:
        """The client does not take its answers: take no more of its calls."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._received += data
        while len(self._received) >= REQUEST.size:
            size, number, timeout_ms, head_bytes = REQUEST.unpack_from(self._received)
            end = REQUEST.size + size
            if size > _REQUEST_BYTES or head_bytes > size:
                self._transport.close()  # no client of ours: there is no telling where the next request begins
                return
            if len(self._received) < end:
                return
            head = bytes(self._received[REQUEST.size : REQUEST.size + head_bytes])
            body = bytes(self._received[REQUEST.size + head_bytes : end])
            del self._received[:end]
            self._take(number, timeout_ms / 1e3, head, body)

    def _take(self, number: int, timeout_s: float, head: bytes, body: bytes) -> None:
        running = self._running.get(number)
        if not head or running is not None:
            if running is not None:
                running.cancel()
            return
        task = asyncio.create_task(self._serve(number, timeout_s, head, body))
        self._running[number] = task
        task.add_done_callback(lambda _: self._running.pop(number, None))

    async def _serve(self, number: int, timeout_s: float, head: bytes, body: bytes) -> None:
        method, metadata = unpack_head(head)
        try:
            handler = self._handlers.get(method)
            if handler is None:
                raise UnsupportedError(
                    f"{method!r} is not served here", field="method", allowed=str(list(self._handlers))
                )
            self._admit(handler.full_name, metadata)
            async with asyncio.timeout(timeout_s):
                answer = await handler.answer(handler.request.FromString(body), CallContext(metadata))
            self._reply(number, 1, answer.SerializeToString())
        except KatydidError as error:
            self._reply(number, 0, to_status(error).SerializeToString())
        except TimeoutError:
            late = DeadlineExceededError(f"{method} took longer than {timeout_s:g} s")
            self._reply(number, 0, to_status(late).SerializeToString())
        except DecodeError:
            malformed = InvalidRequestError(f"{len(body)} bytes are no request of {method}", field="message")
            self._reply(number, 0, to_status(malformed).SerializeToString())
        except Exception as error:
            self._reply(number, 0, to_status(internal_error(error, method)).SerializeToString())

    def _reply(self, number: int, ok: int, body: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(RESPONSE.pack(len(body), number, ok) + body)
