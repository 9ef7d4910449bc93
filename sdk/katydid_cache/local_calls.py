"""Short calls to a service on the same host, over the Unix socket that its shared memory came from.

A block moves in place in a tenth of a millisecond, and a gRPC call costs several times that on each side. So the calls
that go with it (Lookup, Reserve, Commit, Release) travel as they are, the same messages to the same handlers, in a
frame of their own while the socket is open; when it is not, they go over gRPC.

    request   size u32 | number u32 | timeout_ms u32 | head bytes u16 | head | message
    response  size u32 | number u32 | ok u8          | message, or google.rpc.Status where ok is 0

Little-endian; `size` counts what follows the fixed part. The head is the method's name, then keys and values of the
metadata, separated by NUL. A request with no method takes back the one of that number.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2
from katydid.kvcache.v1 import kvcache_pb2 as pb
from katydid_runtime.errors import DataCorruptError, DeadlineExceededError, UnavailableError
from katydid_runtime.rpc_errors import from_status

__all__ = ["REQUEST", "RESPONSE", "LocalCalls", "NearCalls", "pack_head", "unpack_head"]

REQUEST = struct.Struct("<IIIH")
RESPONSE = struct.Struct("<IIB")

_GRACE_S = 1.0

Metadata: TypeAlias = Sequence[tuple[str, str]]
Response = TypeVar("Response", bound=Message)


def pack_head(method: str, metadata: Metadata) -> bytes:
    """Head of a request."""
    return "\0".join((method, *(part for pair in metadata for part in pair))).encode("latin-1")


def unpack_head(head: bytes) -> tuple[str, Metadata]:
    """Method and metadata of a request."""
    method, *parts = head.decode("latin-1").split("\0")
    return method, tuple(zip(parts[::2], parts[1::2], strict=False))


class LocalCalls(asyncio.Protocol):
    """The client's end. `closed` once the service has gone: calls then go another way."""

    def __init__(self) -> None:
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0

    @classmethod
    async def over(cls, connected: socket.socket) -> LocalCalls:
        """Calls over a socket that has handed out the memory."""
        connected.setblocking(False)
        _, calls = await asyncio.get_running_loop().create_unix_connection(cls, sock=connected)
        return calls

    async def call(self, method: str, request: Message, timeout_s: float, metadata: Metadata) -> bytes:
        """The serialised answer. Raises UnavailableError, DeadlineExceededError, and what the service refused with."""
        if self._transport is None or self.closed:
            raise UnavailableError("the cache service has closed its socket")
        number = self._number = (self._number + 1) & 0xFFFFFFFF
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answered
        try:
            self._send(number, timeout_s, pack_head(method, metadata), request.SerializeToString())
            # The service ends the call at its deadline; this only bounds the wait for one that hangs.
            async with asyncio.timeout(timeout_s + _GRACE_S * (timeout_s > _GRACE_S)):
                return await answered
        except TimeoutError:
            self._send(number, 0.0, b"", b"")
            raise DeadlineExceededError(f"{method} took longer than {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._send(number, 0.0, b"", b"")
            raise
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are of no such class

    def connection_lost(self, _error: Exception | None) -> None:
        self.closed = True
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(UnavailableError("the cache service closed its socket"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= RESPONSE.size:
            size, number, ok = RESPONSE.unpack_from(self._received)
            end = RESPONSE.size + size
            if len(self._received) < end:
                return
            body = bytes(self._received[RESPONSE.size : end])
            del self._received[:end]
            answered = self._waiting.get(number)
            if answered is None or answered.done():
                continue
            if ok:
                answered.set_result(body)
            else:
                answered.set_exception(from_status(status_pb2.Status.FromString(body)))

    def _send(self, number: int, timeout_s: float, head: bytes, body: bytes) -> None:
        if self._transport is not None and not self.closed:
            milliseconds = min(max(0, round(1e3 * timeout_s)), 0xFFFFFFFF)
            fixed = REQUEST.pack(len(head) + len(body), number, milliseconds, len(head))
            self._transport.write(b"".join((fixed, head, body)))


class NearCalls:
    """The calls that go with blocks in place: over `local` while it is open, else over the gRPC `stub`."""

    def __init__(self, stub: Any, local: Callable[[], LocalCalls | None], headers: Metadata) -> None:
        self._stub = stub
        self._local = local
        self._headers = tuple(headers)

    async def Lookup(
        self, request: pb.LookupRequest, *, timeout: float, metadata: Metadata | None = None
    ) -> pb.LookupResponse:
        return await self._call("Lookup", request, pb.LookupResponse(), timeout, metadata)

    async def Reserve(self, request: pb.ReserveRequest, *, timeout: float) -> pb.ReserveResponse:
        return await self._call("Reserve", request, pb.ReserveResponse(), timeout)

    async def Commit(self, request: pb.CommitRequest, *, timeout: float) -> pb.CommitResponse:
        return await self._call("Commit", request, pb.CommitResponse(), timeout)

    async def Release(self, request: pb.ReleaseRequest, *, timeout: float) -> pb.ReleaseResponse:
        return await self._call("Release", request, pb.ReleaseResponse(), timeout)

    async def _call(
        self, method: str, request: Message, response: Response, timeout_s: float, metadata: Metadata | None = None
    ) -> Response:
        local = self._local()
        if local is None or local.closed:
            answered: Response = await getattr(self._stub, method)(request, timeout=timeout_s, metadata=metadata)
            return answered
        answer = await local.call(method, request, timeout_s, (*self._headers, *(metadata or ())))
        try:
            response.ParseFromString(answer)
        except DecodeError as error:
            raise DataCorruptError(f"{len(answer)} bytes are no answer to {method}") from error
        return response
