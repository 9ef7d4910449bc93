"""Closes connections whose request head is too long or does not come: uvicorn takes any length, and waits for ever.

It joins the pieces of a header anew with each one that arrives, so that one endless header would stop everybody else.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["HEAD_LIMIT", "HEAD_TIMEOUT_S", "BoundedHeads"]

HEAD_LIMIT = 64 * 1024
HEAD_TIMEOUT_S = 60.0

_TOO_LARGE = (
    b'{"error":{"message":"the head of the request has more than %d bytes","type":"invalid_request_error",'
    b'"param":"headers","code":"payload_too_large","allowed":"at most %d bytes"}}' % (HEAD_LIMIT, HEAD_LIMIT)
)
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_TOO_LARGE), _TOO_LARGE)
)


class BoundedHeads(HttpToolsProtocol):
    """uvicorn's protocol for heads of `HEAD_LIMIT` bytes and `HEAD_TIMEOUT_S` at most, trailers of a body included."""

    _unfinished = 0
    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # Whatever the parser finishes with this piece, sets the count back.
        self._unfinished += len(data)
        super().data_received(data)
        if self._unfinished > HEAD_LIMIT and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(_REFUSAL)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._unfinished = 0
        self._head_came()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unfinished = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unfinished = 0
        super().on_message_complete()

    def _expect_head(self) -> None:
        if self._head_due is None:
            self._head_due = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_came(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _head_is_late(self) -> None:
        self._head_due = None
        if not self.transport.is_closing():
            self.transport.close()
