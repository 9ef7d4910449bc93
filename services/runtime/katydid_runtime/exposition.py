"""The HTTP side of a service that speaks gRPC: GET /metrics, /healthz and /readyz, and nothing else.

A few dozen lines on asyncio instead of a web framework, because the engine and the KV-cache service need no other
HTTP. One request a connection, 8 KiB of headers and five seconds at most, so a stuck scraper costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus

from katydid_runtime.errors import AddressInUseError, SettingsError
from katydid_runtime.metrics import TEXT_TYPE, Metrics

__all__ = ["Exposition", "split_address"]

_HEADER_LIMIT = 8 * 1024
_TIMEOUT_S = 5.0
_UNAVAILABLE = HTTPStatus.SERVICE_UNAVAILABLE


class Exposition:
    """Serves `metrics` at /metrics, and `alive()` at /healthz and `ready()` at /readyz as 200 or 503.

    A process that is not alive is to be started again, one that is not ready to be left in peace. Set `alive` once
    there is something that can get stuck.
    """

    def __init__(self, metrics: Metrics, ready: Callable[[], bool]) -> None:
        self.alive: Callable[[], bool] = lambda: True
        self._metrics = metrics
        self._ready = ready
        self._server: asyncio.Server | None = None

    async def start(self, address: str, *, reuse_port: bool = False) -> str:
        """Listen on `host:port` and return it with the port really bound. Raises AddressInUseError, SettingsError."""
        host, port = split_address(address)
        try:
            self._server = await asyncio.start_server(
                self._handle, host, port, limit=_HEADER_LIMIT, reuse_port=reuse_port or None
            )
        except OSError as error:
            raise AddressInUseError(
                f"cannot listen on http address {address}: {error.strerror}", field="http_listen", value=address
            ) from error
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # a client that sends no request gets no answer
        finally:
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        content_type = TEXT_TYPE
        if method not in (b"GET", b"HEAD"):
            status, body = HTTPStatus.METHOD_NOT_ALLOWED, b"only GET\n"
        elif path == b"/metrics":
            body, content_type = self._metrics.render(_accepted(rest))
            status = HTTPStatus.OK
        elif path == b"/healthz":
            status, body = (HTTPStatus.OK, b"ok\n") if self.alive() else (_UNAVAILABLE, b"stuck\n")
        elif path == b"/readyz":
            status, body = (HTTPStatus.OK, b"ready\n") if self._ready() else (_UNAVAILABLE, b"not ready\n")
        else:
            status, body = HTTPStatus.NOT_FOUND, b"try /metrics, /healthz or /readyz\n"
        lines = (
            f"HTTP/1.1 {status.value} {status.phrase}",
            f"Content-Type: {content_type}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if method == b"HEAD" else body)


def _accepted(head: bytes) -> str:
    """The Accept header's value in a request's head, "" without one."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"accept":
            return value.decode("latin-1")
    return ""


def split_address(address: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` as its parts. Raises SettingsError."""
    host, separator, port = address.rpartition(":")
    if not separator or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        allowed = "host:port with a port of 0 to 65535"
        raise SettingsError(f"{address} is no address: expected {allowed}", value=address, allowed=allowed)
    return host.strip("[]") or "0.0.0.0", int(port)
