"""How a request reaches the gateway: the one seam of the client, with gRPC behind it, or a function in tests.

A transport knows methods of `katydid.gateway.v1.InferenceService` by name ("Chat"), sends one request and returns what
comes back. It raises katydid_runtime.errors alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeAlias

import grpc
from google.protobuf.message import Message
from katydid.gateway.v1 import gateway_pb2_grpc
from katydid_runtime.channel import open_channel
from katydid_runtime.errors import ConflictError
from katydid_runtime.rpc_errors import from_rpc_error
from katydid_runtime.tls import Tls

__all__ = ["GrpcTransport", "Metadata", "MockTransport", "Tls", "Transport"]

Metadata: TypeAlias = Sequence[tuple[str, str]]


class Transport(Protocol):
    """Sends requests. `timeout_s` bounds the whole call; cancelling the caller's task cancels the call."""

    async def unary(self, method: str, request: Message, *, metadata: Metadata, timeout_s: float) -> Any:
        """The one response."""

    def stream(
        self, method: str, request: Message, *, metadata: Metadata, timeout_s: float
    ) -> AsyncGenerator[Any, None]:
        """The responses as they come; an asynchronous generator whose `aclose` cancels the call."""

    async def close(self) -> None:
        """Release the connection; running calls are cancelled."""


class GrpcTransport:
    """A gRPC channel to `address` ("host:port" or "unix:/path")."""

    def __init__(self, address: str, tls: Tls | None = None) -> None:
        self._address = address
        self._channel = open_channel(address, tls)
        self._stub: Any = gateway_pb2_grpc.InferenceServiceStub(self._channel)
        self._closed = False

    async def unary(self, method: str, request: Message, *, metadata: Metadata, timeout_s: float) -> Any:
        self._check_open()
        try:
            return await getattr(self._stub, method)(request, metadata=metadata, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._address) from error

    async def stream(
        self, method: str, request: Message, *, metadata: Metadata, timeout_s: float
    ) -> AsyncGenerator[Any, None]:
        self._check_open()
        call = getattr(self._stub, method)(request, metadata=metadata, timeout=timeout_s)
        try:
            async for response in call:
                yield response
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._address) from error
        finally:
            call.cancel()

    async def close(self) -> None:
        self._closed = True
        await self._channel.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ConflictError("this client is closed")


class MockTransport:
    """Answers from a function, for tests of code that uses the client: no socket, no server.

    `handler(method, request)` returns the response, or for Generate and Chat an iterable or asynchronous generator of
    them, or raises a KatydidError; it may be a coroutine function. `calls` lists (method, request, metadata) in order.
    """

    def __init__(self, handler: Callable[[str, Any], Any]) -> None:
        self._handler = handler
        self.calls: list[tuple[str, Any, Metadata]] = []
        self.closed = False

    async def unary(self, method: str, request: Message, *, metadata: Metadata, timeout_s: float) -> Any:
        async with asyncio.timeout(timeout_s):
            return await self._answer(method, request, metadata)

    async def stream(
        self, method: str, request: Message, *, metadata: Metadata, timeout_s: float
    ) -> AsyncGenerator[Any, None]:
        responses = await self.unary(method, request, metadata=metadata, timeout_s=timeout_s)
        if isinstance(responses, AsyncGenerator):
            async with aclosing(responses):
                async for response in responses:
                    yield response
        else:
            for response in _iterable(responses):
                yield response

    async def close(self) -> None:
        self.closed = True

    async def _answer(self, method: str, request: Message, metadata: Metadata) -> Any:
        self.calls.append((method, request, metadata))
        answer = self._handler(method, request)
        return await answer if isinstance(answer, Awaitable) else answer


def _iterable(responses: Any) -> Iterable[Any]:
    return [responses] if isinstance(responses, Message) else responses
