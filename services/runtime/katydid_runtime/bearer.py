"""Shows a bearer token on every call of a channel.

Interceptors do it for calls that send one message. On calls that stream both ways they would put a queue between the
caller and each frame, so Get and Put are given `headers` by who makes them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from katydid_runtime.trace_context import TraceContext

__all__ = ["headers", "interceptors"]


def headers(token: str | None, trace: TraceContext | None = None) -> tuple[tuple[str, str], ...] | None:
    """The metadata of one call."""
    shown = () if token is None else (("authorization", f"Bearer {token}"),)
    return (shown if trace is None else (*shown, *trace.headers())) or None


def interceptors(token: str | None) -> Sequence[grpc.aio.ClientInterceptor]:
    """For a channel whose calls show `token`; none without one."""
    return () if token is None else (_Unary(token), _ResponseStream(token))


class _Bearer:
    def __init__(self, token: str) -> None:
        self._headers = headers(token) or ()

    def _shown(self, details: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *self._headers)
        return details._replace(metadata=metadata)


class _Unary(_Bearer, grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(
        self, continuation: Callable[..., Awaitable[Any]], client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(self._shown(client_call_details), request)


class _ResponseStream(_Bearer, grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(
        self, continuation: Callable[..., Awaitable[Any]], client_call_details: Any, request: Any
    ) -> Any:
        return await continuation(self._shown(client_call_details), request)
