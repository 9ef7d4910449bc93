"""One HTTP request and its response on raw ASGI: body within its limit, server-sent events, and a watch on the client.

Raw ASGI instead of a streaming response class, because a stream of tokens is one socket write a chunk and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Coroutine, Mapping

from katydid_runtime.errors import InvalidRequestError, KatydidError, PayloadTooLargeError, RequestAbortedError
from starlette.types import Receive, Scope, Send

from katydid_gateway.answer import SLOW_CLIENT_GRACE_S, Answer
from katydid_gateway.http.failures import OPENAI_ERRORS, as_spelled, error_response
from katydid_gateway.validation import usable_id

__all__ = ["Exchange"]

BODY_TIMEOUT_S = 60.0
# Most answers end before: who leaves so early is noticed so much later.
_WATCH_AFTER_S = 0.05


class Exchange:
    """Reads one request, writes one response; `errors` are spelled as the endpoint's API does, fields by `spelled`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        # Of a header that is there twice the first counts.
        self._headers: dict[bytes, bytes] = dict(reversed(list(scope["headers"])))
        self.request_id = f"req-{uuid.uuid4().hex}"
        self.named(None)
        self.started = False
        self.errors = OPENAI_ERRORS
        self.spelled: Mapping[str, str] = {}

    def header(self, name: bytes) -> str:
        """A header by its name in lower case; "" where it is not there."""
        return self._headers.get(name, b"").decode("latin-1")

    def named(self, name: str | None) -> str:
        """The request's id: its header's, else `name` of its body, else one that was made for it.

        One that is not usable is returned to be refused; the response has the one that was made.
        """
        asked = self.header(b"x-request-id") or name or self.request_id
        if usable_id(asked):
            self.request_id = asked
        return asked

    async def body(self, limit: int) -> bytes:
        """The whole body.

        Raises PayloadTooLargeError as soon as it is known, InvalidRequestError for an empty one or one that does not
        come, RequestAbortedError when the client is gone.
        """
        declared = self.header(b"content-length")
        if declared.isdecimal() and int(declared) > limit:
            raise _too_large(declared, limit)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                content = await self._read(limit)
        except TimeoutError:
            raise InvalidRequestError(f"the body did not arrive within {BODY_TIMEOUT_S:g} s", field="body") from None
        if not content:
            raise InvalidRequestError("the body is empty", field="body", allowed="a JSON object")
        return content

    async def _read(self, limit: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise RequestAbortedError("the client left before its request was read")
            part = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(size, limit)
            parts.append(part)
            if not message.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def send_json(self, content: bytes) -> None:
        """A complete 200 response."""
        await self._start("application/json", (b"content-length", str(len(content)).encode()))
        await self._send({"type": "http.response.body", "body": content})

    async def start_events(self) -> None:
        """The head of an event stream; proxies are asked not to buffer it."""
        await self._start(
            "text/event-stream; charset=utf-8", (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")
        )

    async def write(self, content: bytes) -> None:
        """Part of an event stream; waits while the client's socket is full."""
        await self._send({"type": "http.response.body", "body": content, "more_body": True})

    async def end(self, content: bytes = b"") -> None:
        """The last part of an event stream."""
        await self._send({"type": "http.response.body", "body": content})

    async def send_error(self, error: KatydidError) -> None:
        """A response of its own, or the last event of a stream that has begun; no end mark follows an error.

        A client that does not read is not waited for long: the connection is closed then.
        """
        error = as_spelled(error, self.spelled)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SLOW_CLIENT_GRACE_S):
                if not self.started:
                    self.started = True
                    await error_response(error, self.request_id, self.errors)(self._scope, self._receive, self._send)
                else:
                    await self.end(self.errors.event(error))

    async def while_connected(self, answers: list[Answer], writing: Coroutine[None, None, None]) -> None:
        """Run `writing` until it ends or the client is gone; a stuck writer is stopped soon after its answer failed.

        Raises what `writing` raises, RequestAbortedError when the client left.
        """
        loop = asyncio.get_running_loop()
        watch: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(None) as patience:
                writes = True

                def end_in(seconds: float) -> None:
                    # A timeout that is over may not be touched.
                    if writes and not patience.expired():
                        patience.reschedule(loop.time() + seconds)

                def look() -> None:
                    nonlocal watch
                    watch = loop.create_task(self._gone())
                    watch.add_done_callback(lambda _: end_in(0))

                def failed() -> None:
                    if watch is None or not watch.done():
                        end_in(SLOW_CLIENT_GRACE_S)

                for answer in answers:
                    answer.on_failed = failed
                late = loop.call_later(_WATCH_AFTER_S, look)
                try:
                    await writing
                finally:
                    writes = False
                    late.cancel()
        except TimeoutError:
            if not patience.expired():
                raise
            left = watch is not None and watch.done() and not watch.cancelled()
            raise RequestAbortedError("the client left" if left else "the client stopped reading") from None
        finally:
            if watch is not None:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _start(self, content_type: str, *headers: tuple[bytes, bytes]) -> None:
        self.started = True
        await self._send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [
                    (b"content-type", content_type.encode()),
                    (b"x-request-id", self.request_id.encode("latin-1", "replace")),
                    *headers,
                ],
            }
        )


def _too_large(size: object, limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the body has {size} bytes", field="body", value=f"{size} bytes", allowed=f"at most {limit} bytes"
    )
