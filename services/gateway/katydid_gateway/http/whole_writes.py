"""Holds the head of a response back for its first output: uvicorn writes it by itself, and a write wakes the client.

Of a small answer that is a twentieth of all it costs the gateway.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from katydid_gateway.http.bounded_heads import BoundedHeads

__all__ = ["WholeWrites"]

_HEAD = b"HTTP/1.1 200 "


class WholeWrites(BoundedHeads):
    """The protocol over a transport that joins a head to what follows it."""

    _joining: _Joining

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._joining = _Joining(transport)
        super().connection_made(cast(asyncio.Transport, self._joining))

    def on_response_complete(self) -> None:
        # Behind the head of an answer to HEAD nothing follows.
        self._joining.flush()
        super().on_response_complete()


class _Joining:
    __slots__ = ("_head", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(_HEAD):
            self._head = data
            return
        self._transport.write(data)

    def flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
